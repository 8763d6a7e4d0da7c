"""Know before you pay: cards, model sizes, memory term by term, and the plan with the least recompute that fits."""
