"""The one table of tolerances, each with its reason. No test has another."""

# Two exact ways of computing the same thing in fp64 differ by the order of their sums: 1e-15 to 1e-13 here. A real
# fault (a position, a head, a divisor) is at least 1e-6. 1e-10 lies between with room on both sides.
FP64 = 1e-10

# Twenty fp32 AdamW steps: rounding of 6e-8 a step, amplified by the optimizer's normalisation.
FP32_LOSS_AFTER_20_STEPS = 1e-5

# The smallest error a planted fault must cause to count as seen.
FAULT = 1e-6

# Ten fp32 steps in Hugging Face's loops, with clipping and AdamW: losses of about 4, gradient norms of about 10.
LOSS = 1e-5
NORM = 1e-4
# One evaluation in fp32 after those steps, a mean over a few hundred tokens.
EVAL_LOSS = 1e-6
# The same where two groups made the steps: sums over rows in another order, and AdamW as above. It is rounding, since
# in fp64 nothing is left of it (test_what_drifts_over_two_groups_is_rounding).
EVAL_LOSS_AFTER_STEPS = 1e-5
# Logits of one fp32 forward, of about 1 in size: sums of 16 to 64 products, two layers deep.
LOGITS = 1e-5
# A gradient norm over another's that should equal it: NORM, over a norm of about 10.
NORM_RATIO = 1e-5
# A norm summed in fp64 over blocks that are summed in fp32, each rounded by up to 6e-8; in fp32 throughout it would be
# off by 1e-3. What is made of it, the factor that gradients are divided by, is taken in fp32, rounded by 6e-8 too.
NORM_BY_BLOCKS = 1e-7
# One fp32 step compiled against the same uncompiled, of the largest value: sums of up to 64 products in another order.
COMPILED = 1e-5
# One bf16 forward against another that rounds elsewhere: 8 bits of mantissa over two layers.
BF16_LOSS = 1e-2
# Weights after those steps. AdamW divides by the root of a gradient's square: where a gradient is near zero, rounding
# decides a step of up to the learning rate (3e-3); a wrong step anywhere else is of that size too, in most weights.
WEIGHT = 1e-4

# A step's time predicted from the speeds of single kernels, against the step measured: clocks follow power and
# temperature by a few percent, and what is done again is 10% and more of a step.
PREDICTED_STEP = 0.10

# A traced step's peak against the plan's, kernels' workspace and allocator left out of both: tiny layers, where ids and
# norms weigh more than in any real model.
TRACED_MEMORY = 0.05

# The bytes that a rank of a real model allocated on a GPU against the plan's.
PLANNED_MEMORY = 0.05
