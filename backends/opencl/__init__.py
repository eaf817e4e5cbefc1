"""Graphics cards, and whatever else speaks OpenCL, through PyOpenCL."""
