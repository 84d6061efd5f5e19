"""Settings for the whole suite."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)  # to be shards
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")
