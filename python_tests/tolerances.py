"""Every tolerance of the suite, each with its reason.

Errors of an update are counted in *ulp*: the distance to the fp64 oracle over the spacing of fp32 numbers at the magnitude
of the sum, i.e. at the value that the same formula has when all its terms are taken positive. A result that cancels cannot
be better than one rounding of its terms, and torch's is not either. Where nothing cancels it is the ulp of the result.
"""

STEP_ULP = 2.0
"""How much worse than torch's own fp32 optimizer an update may be: max over the elements of ours <= max of torch's + this.

Both round about ten times on the way (gradient scale, moments, root, division, step size), in different places. Neither
order is better: a difference of two half-ulp roundings each way is the noise between them. The mildest mutant, a bias
correction in fp32, is off by 100 ulp where the weight is small.
"""

NORM_ULP = 2.0
"""The same for the norm: a tree of fp32 partial sums is that good, and the clipped gradient inherits its error."""

SUB_ULP_MASTER = 5e-7
"""Half of the last digit of 0.997497, the figure of the sub-ulp case: its fp32 trajectory is exact to 168 ulp a step."""
