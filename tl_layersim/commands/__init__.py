"""The commands of the command line, one file each; no other package imports from here.

A command reads its options (`options`, `run_file`), opens models and data (`inputs`), calls a public function of this package,
and prints and writes the result (`output`, `tables`).
"""
