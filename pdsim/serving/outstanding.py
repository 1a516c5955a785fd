# SPDX-License-Identifier: Apache-2.0
"""The tokens that each instance has still to see to, as far as a router knows: what load balancing goes by."""

from __future__ import annotations

from pdsim.serving.instances import InstanceRegistry
from pdsim.serving.routed_requests import RoutedRequest

__all__ = ["OutstandingTokens"]


class OutstandingTokens:
    """Counts requests at the instances of *registry*, from when they are sent out until they are over.

    A prefill instance has the tokens of a prompt until it has answered; a decode instance those of the prompt and of
    the expected output until the request is over, and the prompt's KV is under way to it until prefill has written
    it.  With *output_known* the expected output is the request's own, otherwise the mean of those that are done, as
    a router cannot know more.

    Invariant: `RoutedRequest.counted` says whether a request is counted, so each is taken off exactly once.
    """

    def __init__(self, registry: InstanceRegistry, output_known: bool) -> None:
        self.generated = 0, 0  # requests that have all their tokens, and how many those were
        self._registry = registry
        self._output_known = output_known

    def expected(self, request: RoutedRequest) -> int:
        """Return how many tokens *request* will generate, as far as a router knows.

        Unless output is known, that is the mean of those that are done, rounded down; 0 before the first.
        """
        if self._output_known:
            return request.output
        count, tokens = self.generated
        return tokens // count if count else 0

    def count(self, request: RoutedRequest) -> None:
        """Count *request* at the two lives that it is sent to."""
        request.counted = True
        request.expected = self.expected(request)
        self._registry.add(request.prefill, request.input)
        self._registry.add(request.decode, request.input + request.expected)
        self._registry.send(request.decode, request.input)

    def answered(self, request: RoutedRequest) -> None:
        """Take the prompt of *request*, whose KV waits to be pulled, off its prefill instance."""
        request.answered = True
        self._registry.add(request.prefill, -request.input)

    def prefilled(self, request: RoutedRequest) -> None:
        """Take the prompt of *request*, whose KV is moved, off prefill and off what is under way; once."""
        if request.prefilled:
            return
        request.prefilled = True
        if request.counted:
            self._registry.send(request.decode, -request.input)
        if not request.answered:
            self._registry.add(request.prefill, -request.input)

    def done(self, request: RoutedRequest) -> None:
        """Take note of the length of an answer that is complete."""
        self.generated = self.generated[0] + 1, self.generated[1] + request.output

    def uncount(self, request: RoutedRequest) -> None:
        """Take off what is still counted of *request*, which is over or will be sent out anew."""
        if request.counted:
            request.counted = False
            if not request.prefilled:
                self._registry.send(request.decode, -request.input)
            if not (request.prefilled or request.answered):
                self._registry.add(request.prefill, -request.input)
            self._registry.add(request.decode, -request.input - request.expected)
