# SPDX-License-Identifier: Apache-2.0
"""A number of microbatches that does not divide the batch is not ignored in silence."""

import warnings

from tests.engine.runs import PP2, Batches, be_quiet, lm, make_trainer, strategy_of, token_batches
from tests.harness import run_ranks


def warned(size):
    def body():
        be_quiet()
        trainer = make_trainer(strategy_of(PP2), 2, max_steps=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(lm(), Batches(token_batches(1, size)))
        return [str(each.message) for each in caught if "num_microbatches" in str(each.message)]

    return run_ranks(2, body, init=False, timeout_s=60)[0]


def test_warns_with_the_numbers_that_fit():
    (message,) = warned(6)
    assert "num_microbatches=4 does not divide the batch of 6 samples" in message
    assert "num_microbatches=2, 3 or 6" in message
    assert warned(8) == []
