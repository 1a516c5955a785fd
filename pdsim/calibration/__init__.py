"""What the model's parameters are fitted from, and how well: calibrations, their raw points, and the fit."""
