import keras
import numpy as np


class TwoMoons:
    def build_model(self):
        inputs = keras.Input((2,))
        x = keras.layers.Dense(32, activation="relu")(inputs)
        return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))

    def loss(self, y_true, y_pred):  # one number per example: hvps takes the mean over all ranks
        return keras.losses.binary_crossentropy(y_true[:, None], y_pred)

    def metrics(self):
        return [keras.metrics.BinaryAccuracy(name="accuracy"), keras.metrics.AUC(name="auc")]

    def train_data(self, n=4000, seed=0):
        rng = np.random.default_rng(seed)
        side, angle = rng.integers(0, 2, n), rng.uniform(0, np.pi, n)
        x = np.stack([np.cos(angle) + side, np.sin(angle) * (1 - 2 * side)], 1)
        return x + rng.normal(0, 0.15, (n, 2)), side.astype("float32")

    def eval_data(self):
        return self.train_data(1000, seed=1)
