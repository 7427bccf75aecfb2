"""The experiments of cuSNN (Xiang et al. 2022) that are its own: others share a module with those of Xu et al."""
