"""Example kernels, right and wrong, written in Triton as a kernel author would hand them in."""
