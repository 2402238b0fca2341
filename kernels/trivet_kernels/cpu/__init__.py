"""Native operators for CPUs: what is compiled (`build`), how it is reached (`library`), and a whole decoder step (`decoder`)."""
