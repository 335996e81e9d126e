"""Settings of every test."""

import hypothesis

# A busy machine makes single examples slow; what takes too long shows in the suite's time instead.
hypothesis.settings.register_profile("funitel", deadline=None)
hypothesis.settings.load_profile("funitel")
