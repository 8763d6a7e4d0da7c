"""The one table of tolerances, each with its reason. No test has another."""

# Two exact ways of computing the same thing in fp64 differ by the order of their sums: 1e-15 to 1e-13 here. A real
# fault (a position, a head, a divisor) is at least 1e-6. 1e-10 lies between with room on both sides.
FP64 = 1e-10

# Twenty fp32 AdamW steps: rounding of 6e-8 a step, amplified by the optimizer's normalisation.
FP32_LOSS_AFTER_20_STEPS = 1e-5

# The smallest error a planted fault must cause to count as seen.
FAULT = 1e-6
