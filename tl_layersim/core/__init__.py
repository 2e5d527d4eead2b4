"""Errors, argument checks, sums, results and files, on which all other packages build; it imports no model library.

Other packages may import:

* `errors`: `LayersimError`, `LayersimTypeError`, `LayersimWarning`, `warn`, `in_words`, `without_secrets`
* `bounds`: types of numbers within bounds, such as `PositiveInt`
* `argument_checks`: `typed`; `wording`: `brief`,
  `number_text`, `p_value_text`, `equation`, `headed`, `MEANING_OF_MARGINS`, `amount`
* `p_values`: `Correction`, `adjusted_together`, `is_symmetric`
* `sums`: `Sums`; `pairwise_summation`: `push`, `fold`, `next_size`; `histogram_quantiles`: `quantiles_from_histogram`
* `blocks`: `DataBlock`, `first_block_size`, `rows_in_block`, `MOST_BLOCKS`; `sum_tree`: `SumTree`, `most_nodes`
* `jackknife`: `leave_one_out`, `ConfidenceInterval`; `intervals`: `with_replicates`, `headline_margins`, `headline_lines`,
  `headline_texts`, `margin_text`, `bounds_of`, `bounded_field`, `has_margin`, `function_interval`, `total_of`, `aligned`,
  `refuse_no_blocks`
* `findings`: `site_in_words`, `with_margin`, parts of sentences about results
* `label_table`: `label_table`, `BLOCK_AXES`, `COLUMNS`
* `fields`: `axes`, `Declaration`, `declarations`; `results`: `Result`, `LayerMatrix`, `LayerCurve`, `Report`, `Picture`, `load`
* `labelled_tables`: `stack`, `Result.to_xarray` and `Report.to_xarray`
* `provenance`: `Provenance`, `JOINT`; `field_types`: `refuse_other_types`; `function_code`: names and digests of
  functions
* `report_tables`: `field_table`
* `storage`: `read`, `write`, `reading`, `replacing`, `refuse_unwritable`, `refuse_unwritable_folder`, `REPORT_FILE`
* `resumable_file`: the file format of interrupted runs; `data_pass_progress`: `Tally`, the sums and counts of a run
* `training_loop`: `TrainingSteps`, `run_steps`; `shuffle`: `Shuffle`, the order of rows in training
* `discovery`: `discovered`, the classes that the modules of a package define
* `distributed`: `Deal`, `ALONE`, `agree`, `add_over_ranks`, `add_blocks_over_ranks`, `rank_and_size`, `weight_peers`,
  `refuse_parts`
* `server_addresses`: `is_address`, `shown`, `without_login`
"""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: most need torch, without which the command line prints its help.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
