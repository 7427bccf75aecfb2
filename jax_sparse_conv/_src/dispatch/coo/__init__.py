"""Which COO* kernel a call gets: the compiled variants and the analytical model of Xiang et al. 2022, section 3.5.

tests/dispatch holds the model to the paper's equations and to counts.
"""
