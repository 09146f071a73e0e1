// The text constant of the operator overflow_fast::frame: a call as
// overflow_fast.capture.compiled encodes it. It contains no quote and no backslash, because
// inductor's C++ wrapper puts it between quotes without escaping it.
//
//   call   = kind flags ":" text *(" " item)   the text is the class's name
//   kind   = "F" forward | "B" backward | "R" recorded
//   flags  = ["r" the root's call ends] ["f" there is a frame] ["l" the root returned a loss]
//   item   = "n:" path                  None
//          | "x:" path                  no tensor
//          | "w:" path ":" text         a tensor that cannot be scanned, and why
//          | "t" [number] ":" path      a tensor passed to the operator
//          | "r" [number] ":" path      the same, one that the compiled code returns
//          | "k" number ":" path        a tensor passed to an earlier operator
//          | "g" number ":" path        a tensor passed to an earlier operator and to this one
//          | "u:=" text                 no entry: the type of a value that was not looked into
//   path   = ("i" input | "o" output | "O" one listed only if it is bad | "=" text a name) *part
//   part   = "#" number [0] | key | "!" text .attribute
//   key    = "@" text ['key'] | "*" integer [3] | "(" number of keys, *key [('key', 3)]
//   text   = UTF-8, all but letters, digits and "_.-~" as %XX
#pragma once

#include <string_view>

#include "labels.h"
#include "traced.h"

namespace overflow_fast {

// Throws a ValueError for any other text.
TracedCall parse_traced(std::string_view text, LabelTable& labels);

}  // namespace overflow_fast
