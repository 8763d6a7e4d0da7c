"""The only core folder that knows transformers: which architectures are exact, and how attention is bound."""
