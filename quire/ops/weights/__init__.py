"""The forms of weights, and products with them."""
