"""The causes: why a number is non-finite, what follows from it, what is said of it.

A row of this table is all that a cause needs: the report, the page, the log and the
tables of the documentation read it here. What finds one is `explainer/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cause:
    """A cause.

    Attributes:
        name: What a report calls it, such as "underflow".
        meaning: What was measured where a report names it, in Markdown.
        help: What it means, and what helps in general; "" where that is not known.
        advice: What to try where no remedy was tried, as a clause; "" for nothing.
        sections: The sections of "my run is nan" to look at, by their headings.
        gist: What the first line of a report says of it, with the fields of `gist.py`.
        cancelled: The same where it is a difference whose operands rounding alone keeps
            apart; or "".
        remedies: What is tried against it: "calls" (other torch calls in the place of
            those that fail), "weights" (they are repaired), "samples" (those that are
            bad are left out).
        is_overflow: Whether a number was too large for its dtype.
        may_be_intended: Whether -inf that it gives may be meant, as that of a mask is.
        names_maker: Whether it is known then what made the value.
        translations: Its name in words, by the language of a page.
    """

    name: str
    meaning: str = ""
    help: str = ""
    advice: str = ""
    sections: tuple[str, ...] = ()
    gist: str = "{name}: {call}{reason}"
    cancelled: str = ""
    remedies: tuple[str, ...] = ()
    is_overflow: bool = False
    may_be_intended: bool = False
    names_maker: bool = True
    translations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Cause:
        """The cause of a name; of one that is not in the table nothing is known."""
        return CAUSES.get(name) or cls(name)


RANGE_OVERFLOW = Cause(
    "range overflow",
    "computed in float64, the result is beyond the dtype's maximum",
    """\
The result is a number, and the dtype cannot hold it: float16's maximum is 65504,
that of bfloat16 and float32 3.4e38. Use a wider dtype for that module
([`keep_in_fp32`](guides/precision.md#parts-of-a-model-in-float32)), change the order of
operations so that numbers stay small, or bound the argument of an `exp`.""",
    sections=("float16: a value is too large", "Adam in float16"),
    gist="{call} overflowed {dtype}{size}{reason}",
    remedies=("calls",),
    is_overflow=True,
    translations={"zh": "上溢", "ko": "오버플로"},
)
UNDEFINED = Cause(
    "undefined",
    "float64 gives nan or inf as well: 0 / 0, the logarithm of 0, a softmax of -inf. "
    "The evidence names the input that is outside of the operation's domain, and from "
    "which operation on float64 was tried",
    """\
The operation has no finite value for its inputs in any precision: 0 / 0, the
logarithm of 0, the root of a negative number, a softmax of nothing but -inf. Bound
the input, not the output.""",
    sections=("Attention masks", "bfloat16: a probability rounds to 1"),
    gist="{numbers} is undefined{outside}{then}{reason}",
    remedies=("calls", "weights"),
    may_be_intended=True,  # `mask.log()`
    translations={"zh": "无定义", "ko": "정의되지 않음"},
)
UNDERFLOW = Cause(
    "underflow",
    "a number too small for its dtype became 0 in an operation before it, which the "
    "evidence names (`report.explanation.lost_by`); with its result in float64 the "
    "failing one is finite",
    """\
A number too small for the dtype became 0 before, and an operation such as a logarithm
or a division was given that 0: the evidence names where it was lost. Use the form that
never makes the small number: `log_softmax`, `logsigmoid`, `logsumexp`; or a lower
bound that the dtype holds.""",
    sections=("bfloat16: a probability rounds to 1",),
    gist="{numbers}{then}: {lost} underflowed{change}{also}",
    remedies=("calls",),
    translations={"zh": "下溢", "ko": "언더플로"},
)
ROUNDING = Cause(
    "rounding",
    "an operation before it has rounded the value away, such as a sigmoid to 1, and is "
    "named likewise. A matrix that is singular in its dtype alone is of this cause, "
    "too",
    """\
A result was rounded before, such as a sigmoid or a `tanh` to 1, and the operation that
fails was given the rounded number. Use the form that never makes it, such as
`logsigmoid` of the negative logit.""",
    sections=("bfloat16: a probability rounds to 1",),
    gist="{numbers}{then}: {lost} was rounded{change}{also}",
    cancelled="{numbers}{then}: {difference} cancels to {change}{also}",
    remedies=("calls",),
    translations={"zh": "舍入", "ko": "반올림"},
)
SINGULAR_GRADIENT = Cause(
    "singular gradient",
    "the forward is finite, its derivative is not",
    """\
The forward is finite, and its derivative is not: a root or a power below 1 at 0,
`acos` at 1, or the branch that `torch.where` leaves out. Bound the input of the
operation, so that backward cannot reach the singular place.""",
    sections=("The loss is finite, its gradient is not",),
    gist="{numbers}: {slope}{outside}{reason}",
    remedies=("calls",),
    translations={"zh": "梯度奇异", "ko": "발산하는 미분"},
)
GRADIENT_EXPLOSION = Cause(
    "gradient explosion",
    "the forward is finite, and the gradient grew by a factor with each call "
    "up to an overflow; the factor was measured in the replay",
    """\
The forward is finite, and the gradient grows by a factor with each call
that it goes back through, until the dtype cannot hold it. Smaller or orthogonal
weights, normalizations or residual connections keep the factor near 1. Clipping by the
norm afterwards comes too late for an inf.""",
    remedies=("calls",),
    is_overflow=True,
    translations={"zh": "梯度爆炸", "ko": "그래디언트 폭발"},
)
EMPTY_REDUCTION = Cause(
    "empty reduction",
    "a mean or a variance of nothing, or of too few",
    """\
A mean, or a division by a count, of no elements. Divide by at least 1, or return 0.""",
    sections=("Losses: nothing to average",),
    remedies=("calls",),
    translations={"zh": "对空集求平均", "ko": "빈 집합의 평균"},
)
DIVERGENCE = Cause(
    "divergence",
    "with the weights as large as some steps ago the same step is finite",
    """\
The weights have grown so far that a layer overflows; with the weights as large as
some steps ago the same step is finite. Lower the learning rate, warm up, clip
gradients.""",
    advice="load an older checkpoint, and lower the learning rate, warm up, or clip "
    "gradients",
    sections=("The learning rate is too high",),
    translations={"zh": "发散", "ko": "학습 발산"},
)
BAD_SETTING = Cause(
    "bad setting",
    "a learning rate, weight decay, epsilon or beta was nan or inf in the optimizer's "
    "step, which made weights non-finite, or did so when it was made again",
    """\
A learning rate, weight decay, epsilon or beta in `param_groups` was nan or inf in a
step: check what sets it. A learning rate that is a plain number is seen before the
step, which is undone; else the weights are lost: load a checkpoint.""",
    translations={"zh": "设置有误", "ko": "잘못된 설정"},
)
BAD_DATA = Cause(
    "bad data",
    "the batch was non-finite before the step",
    """\
The batch was non-finite before the model saw it.""",
    sections=("A nan in the data",),
    remedies=("samples",),
    translations={"zh": "数据有问题", "ko": "잘못된 데이터"},
)
BAD_WEIGHTS = Cause(
    "bad weights",
    "a weight or a buffer was non-finite before the step",
    """\
A weight or a buffer was non-finite before the step: a bad checkpoint, or memory that
was never initialized.""",
    sections=("The checkpoint is already nan",),
    translations={"zh": "权重有问题", "ko": "잘못된 가중치"},
)
LEFT_OVER_GRADIENTS = Cause(
    "left-over gradients",
    "an earlier step made them non-finite, and they were not cleared since: call "
    "`optimizer.zero_grad()` where `NonFiniteError` is caught",
    translations={"zh": "残留的梯度", "ko": "남아 있는 그래디언트"},
)
NOT_REPRODUCIBLE = Cause(
    "not reproducible",
    "the same step, run again, is finite; or it reads memory that nobody wrote to",
    """\
The same step is finite when it is run again, or it reads memory that nothing has
written to.""",
    sections=("It does not happen again",),
    may_be_intended=True,
    names_maker=False,
    translations={"zh": "无法复现", "ko": "재현되지 않음"},
)
ONLY_COMPILED = Cause(
    "only in compiled code",
    "the same code, run eagerly, is finite",
    """\
The compiled step is non-finite each time, and the same code run eagerly is not.""",
    may_be_intended=True,
    translations={"zh": "仅在编译后的代码中", "ko": "컴파일된 코드에서만"},
)
CONSTANT = Cause(
    "constant",
    "code wrote the inf or nan as a number, as `masked_fill` does, and no operation "
    "has computed it; where it is meant, `allow` keeps it from being an alarm",
    sections=("Attention masks",),
    gist="{name}: {numbers}{reason}",
    remedies=("calls",),
    may_be_intended=True,
    translations={"zh": "常量", "ko": "상수"},
)
UNKNOWN = Cause(
    "unknown",
    "what was tried did not decide it; `note` lines say what was not replayed",
    sections=("If none of this is yours",),
    may_be_intended=True,
    names_maker=False,
    translations={"zh": "未知", "ko": "알 수 없음"},
)

CAUSES = {each.name: each for each in list(globals().values()) if type(each) is Cause}
