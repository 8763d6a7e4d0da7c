"""The only core folder that imports transformers: which architectures are exact, and how attention is bound."""
