"""The commands of the command line; no other package imports from here.

`options` generates the options of a command from the functions and classes that it calls, and parses values such as `3/64`. A
command opens models and data (`models_and_data`), calls a public function of this package, and prints and writes the result
(`output`, `run_file`). The commands are in `measure`, `stitch_and_train` and `show_merge_list`.
"""
