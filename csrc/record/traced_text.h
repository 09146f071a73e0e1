// The constant of the operator overflow_fast::frame: what overflow_fast.recording.traced_graph has written
// down of a call. It holds no quote and no backslash, because inductor's C++ wrapper writes it
// between quotes as it is.
//
//   call   = phase flags ":" text *(" " item)   the text is the class's name
//   phase  = "F" forward | "B" backward | "R" recorded
//   flags  = ["r" the root's call ends] ["f" there is a frame] ["l" the root returned a loss]
//   item   = "n:" path                  None
//          | "x:" path                  no tensor
//          | "w:" path ":" text         a tensor that cannot be scanned, and why
//          | "t" [number] ":" path      a tensor that the operator is given
//          | "r" [number] ":" path      the same, one that the compiled code returns
//          | "k" number ":" path        a tensor that an earlier operator was given
//   path   = ("i" input | "o" output | "=" text a name) *part
//   part   = "#" number [0] | "@" text ['key'] | "*" integer [3], a key | "!" text .attribute
//   text   = UTF-8, all but letters, digits and "_.-~" as %XX
#pragma once

#include <string_view>

#include "labels.h"
#include "traced.h"

namespace overflow_fast {

// Throws a ValueError at anything else.
TracedCall parse_traced(std::string_view text, LabelTable& labels);

}  // namespace overflow_fast
