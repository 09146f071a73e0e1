"""Replays a non-finite step and finds out which operation made it, and why.

1. Three doors make a `BadStep` (`bad_step.py`): the models, the calls that are run
   again, what was seen of the step, and the limits. They are the guard's
   `StepExplainer` (`step_explainer.py`), `explain()` (`explain.py`) and
   `explain_folder()`.
2. `investigate()` (`explain.py`) goes from there to an `Explanation`. It adds what is
   new in the step (`news.py`), and the file from which it is explained again
   (`step_file.py`).
3. A `Replayer` (`replayer.py`) runs the calls (`calls.py`) and returns a
   `ReplayResult`: outputs, losses, gradients, which of them are bad. Each run begins
   and ends with the state of the step (`snapshot.py`) and ends before its first effect
   (`effects/`). Several ranks run it together, and one of them leads
   (`replay_ranks.py`). The first run is compared with the step (`replay_check.py`).
4. A run that is traced has an `OpTable` (`op_table.py`), too: each operation is an
   `OpCall` (`op_call.py`) with its module, its lines (`users_lines.py`), the torch call
   that it is of (`torch_calls.py`), and what it was given, as it was then
   (`memory.py`). Of one that made bad values of finite ones `root_op.py` says why: its
   `Details`.
5. A `Search` (`search.py`) asks the `Question`s of `questions.py`: without a run, of
   the first one, and of a traced one. The first that has an answer explains the step.
   It has a `Budget` (`budget.py`), and so have the trials of remedies.
6. Else `trace_back.py` walks from what is bad to its `RootOp`: the `OpCall` that made
   it, or a `Leaf` (`leaves.py`), which was bad before; not to infs that are meant
   (`meant_infs.py`).
7. `explain_origin.py` makes the `Explanation` of that. Its cause is corrected where a
   number was lost before (`Lost`, `rounding.py`), where results or weights have grown
   (`call_growth.py`, `weight_growth.py`), or where an update made a weight non-finite
   (`optimizer_step.py`). Its reason is what made a 0 that is undefined (`Maker`,
   `made_zero.py`).
8. `sample.py` finds the sample that it comes from, by halving (`halving.py`), and
   `sentinel.py` a number in it that stands for a missing value.
9. `remedies/` tries changes: of a `Failure`, which is the explanation with all that was
   measured, `attempts.py` makes `Trial`s, and `trials.py` a `Remedy` of each.
10. Where the calls leave it open, `views.py` explains the step by other ones: with the
    program's own lines (`loss_call.py`, whose random states are `rewound.py`'s;
    `gradient_lines.py`), or by the forwards alone.
11. The `Explanation` (`guard/report/explanation.py`) is data: cause, operation, reason,
    sample, remedies. The report has the words: `gist.py` and a row of `causes.py` the
    first line, `answer.py` the rows below, `op_words.py` an operation, `notes.py` what
    was left open. A row has of a sentence what the first line leaves (`parted()`).

Sentences that depend on numbers which no field holds stand beside what measures them:
of a leaf, a growth, a sentinel, the domain of an operation, news. So do notes of one
file alone, as on what was tried (`attempts.py`, `trials.py`), and the texts of
remedies, each in its row. Texts of questions are for readers of the tree.
"""
