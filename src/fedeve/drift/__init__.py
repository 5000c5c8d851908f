"""The drift lab: measure period drift and client drift, and draw the paper's analysis for any federation."""
