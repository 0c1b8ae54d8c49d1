"""The one forward + loss + gradient body that every backend traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hvps.errors import ConfigError

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def loss_and_gradients(
    *,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: Callable[[Any, Any], Any],
    x: Any,
    y: Any,
    weight: tf.Tensor,
    examples: tf.Tensor,
    shares: int,
) -> tuple[list[Gradient], tf.Tensor]:
    """Gradients of this replica's part of the objective.

    The objective is the mean loss over the `examples` of the whole update plus the model's own
    penalties. Each of the `shares` replicas and micro-batches contributes its summands, so adding
    the gradients of all of them gives the gradient of the whole, whatever their sizes are.

    Args:
        weight: float32 [rows]; weight of each row, 0 for padding.
        examples: float32 scalar; true examples in the update over all replicas.
        shares: how many parts add up to one update (ranks × accumulation).

    Returns:
        Gradients in the order of `model.trainable_variables`, scaled as the optimizer's
        `scale_loss` does, and the sum of this part's per-example losses, float32 scalar.
    """
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        objective, loss_sum = _objective(model, loss, x, y, weight, examples, shares)
        objective = optimizer.scale_loss(objective)
    gradients = tape.gradient(objective, variables)
    return [_complete(g, v) for g, v in zip(gradients, variables, strict=True)], loss_sum


def stateless_loss_and_gradients(
    *,
    model: keras.Model,
    loss: Callable[[Any, Any], Any],
    weights: list[tf.Tensor],
    others: list[tf.Tensor],
    x: Any,
    y: Any,
    weight: tf.Tensor,
    examples: tf.Tensor,
    shares: int,
    tape: tf.GradientTape,
    watched: Callable[[], list[tf.Tensor]],
) -> tuple[list[Gradient], list[Gradient | None], list[tf.Tensor], tf.Tensor]:
    """The same for a model whose variables live elsewhere: values come in, new values go out.

    Args:
        weights: values of `model.trainable_variables`.
        others: values of `model.non_trainable_variables`, with the states of seed generators.
        tape: a new tape; what is to be differentiated besides `weights` may be watched on it
            while the model runs.
        watched: called afterwards, gives these further tensors.

    Returns:
        Gradients of `weights`, those of the further tensors, new values of `others`, and the sum
        of the per-example losses.
    """
    values = zip(
        [*model.trainable_variables, *model.non_trainable_variables],
        [*weights, *others],
        strict=True,
    )
    with tape:
        tape.watch(weights)
        with keras.StatelessScope(state_mapping=values, collect_losses=True) as scope:
            objective, loss_sum = _objective(model, loss, x, y, weight, examples, shares)
    new = [scope.get_current_value(v) for v in model.non_trainable_variables]
    further = watched()
    gradients = tape.gradient(objective, [*weights, *further])
    complete = [_complete(g, v) for g, v in zip(gradients[: len(weights)], weights, strict=True)]
    return complete, gradients[len(weights) :], new, loss_sum


def _objective(
    model: keras.Model,
    loss: Callable[[Any, Any], Any],
    x: Any,
    y: Any,
    weight: tf.Tensor,
    examples: tf.Tensor,
    shares: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """This replica's part of the objective, and the sum of its per-example losses."""
    loss_sum = tf.reduce_sum(per_example_loss(loss, y, forward(model, x, True)) * weight)
    objective = loss_sum / examples
    for penalty in model.losses:
        objective += tf.reduce_sum(tf.cast(penalty, tf.float32)) / shares
    return objective, loss_sum


def _complete(gradient: Gradient | None, variable: Any) -> Gradient:
    """A variable that this loss does not reach has no gradient on any rank; Keras then warns and
    leaves it out. Zeros keep the ranks' lists aligned and mean the same."""
    if gradient is None:
        return tf.zeros_like(variable)
    if isinstance(gradient, tf.IndexedSlices):
        return merge_rows(gradient)
    gradient.set_shape(variable.shape)
    return gradient


def forward(model: keras.Model, x: Any, training: bool) -> Any:
    """Predictions in at least float32, so that losses and metrics never see half precision."""
    if getattr(model, "_call_has_training_arg", True):
        y_pred = model(x, training=training)
    else:
        y_pred = model(x)

    def widened(tensor: Any) -> Any:
        half = tensor.dtype in (tf.float16, tf.bfloat16)
        return tf.cast(tensor, tf.float32) if half else tensor

    return tf.nest.map_structure(widened, y_pred)


def per_example_loss(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any) -> tf.Tensor:
    """The task's loss as float32 [rows]; axes beyond the first are averaged.

    Raises:
        ConfigError: the loss has no axis for the examples.
    """
    value = tf.cast(loss(y, y_pred), tf.float32)
    if value.shape.rank == 0:
        raise ConfigError(
            "task: loss() returned a single number",
            rule="one loss per example, shape [batch]; hvps takes the mean over all ranks",
            received="a scalar",
            do="do not reduce: use the functions in keras.losses, or reduction=None",
        )
    if value.shape.rank is not None and value.shape.rank > 1:
        value = tf.reduce_mean(value, axis=list(range(1, value.shape.rank)))
    return value


def merge_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up rows of the same index, as the dense gradient does.

    Keras's optimizers take the square of each row, and its clipping the norm of them all: with an
    index that occurs twice both would be of another gradient. It is also fewer bytes to send.
    """
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, tf.TensorShape(_static_shape(slices)))


def _static_shape(slices: tf.IndexedSlices) -> list[int]:
    shape = slices.dense_shape
    if isinstance(shape, tf.TensorShape):
        return shape.as_list()
    known = tf.get_static_value(shape)
    assert known is not None, "a variable's shape is known when the step is traced"
    return [int(n) for n in known]


class AnyBatch:
    """A `tf.function` that is traced once, for batches of every size.

    An epoch's smaller last batch would otherwise trace it again, which takes longer than an epoch
    of a small model; and the traced function is called directly, which saves the fraction of a
    millisecond in which `tf.function` looks for a trace that fits.

    Args:
        body: function of nests of tensors whose axis 0 is the batch, and of others of fixed shape.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        # No XLA: Horovod has no kernels for it here. No autograph: Keras's own step is not
        # converted either, and it would wrap the errors that a task is to be told of.
        self._function = tf.function(
            body, reduce_retracing=True, jit_compile=False, autograph=False
        )
        self._traced: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._traced is None:
            self._traced = self._function.get_concrete_function(
                *tf.nest.map_structure(_any_batch, arguments)
            )
        try:
            return self._traced(*arguments)
        except (TypeError, ValueError):
            # Other axes differ too, such as the length of a sequence: let TensorFlow find or make
            # the trace. Inside a traced function no Python code runs that could raise these.
            return self._function(*arguments)


def _any_batch(value: Any) -> Any:
    spec = tf.type_spec_from_value(value)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
