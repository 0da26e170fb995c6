//! Rotary positions (Su et al. 2021, arXiv:2104.09864), rotating halves as Llama does.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// Cosines and sines of every position: feature `i` of the first half turns with feature `i` of the
/// second half by `position * base^(-2i / width)`.
///
/// Its two directions act on plain tensors; attention calls them from its forward and backward.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    /// `[1, 1, max positions, width / 2]`
    cosine: Tensor<4>,
    sine: Tensor<4>,
}

impl RotaryTable {
    /// The table for heads of `width` features (an even number).
    pub fn new(
        max_positions: usize,
        width: usize,
        base: f64,
        device: &Device,
        dtype: DType,
    ) -> Self {
        let half = width / 2;
        let angles: Vec<f64> = (0..max_positions)
            .flat_map(|position| {
                let angle = move |i| position as f64 * base.powf(-2.0 * i as f64 / width as f64);
                (0..half).map(angle)
            })
            .collect();
        let device = device.clone().inner();
        let table = |values: Vec<f64>| {
            let data = TensorData::new(values, [1, 1, max_positions, half]);
            Tensor::from_data(data, (&device, dtype))
        };
        Self {
            cosine: table(angles.iter().map(|x| x.cos()).collect()),
            sine: table(angles.iter().map(|x| x.sin()).collect()),
        }
    }

    /// Turns `[batch, heads, seq, width]`, whose first token is at position 0.
    pub fn turn(&self, x: Tensor<4>) -> Tensor<4> {
        self.turn_by(x, 1.0)
    }

    /// Turns back: the inverse and the transpose of [`turn`](Self::turn), so its backward.
    pub fn turn_back(&self, x: Tensor<4>) -> Tensor<4> {
        self.turn_by(x, -1.0)
    }

    /// `(a cos - b sin, b cos + a sin)` of the halves `a` and `b`.
    fn turn_by(&self, x: Tensor<4>, direction: f64) -> Tensor<4> {
        let [_, _, seq, width] = x.dims();
        let cosine = self.cosine.clone().narrow(2, 0, seq);
        let sine = self.sine.clone().narrow(2, 0, seq).mul_scalar(direction);
        let (a, b) = (
            x.clone().narrow(3, 0, width / 2),
            x.narrow(3, width / 2, width / 2),
        );
        let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
        let second = b * cosine + a * sine;
        Tensor::cat(vec![first, second], 3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(width: usize) -> RotaryTable {
        RotaryTable::new(16, width, 10_000.0, &Device::flex(), DType::F64)
    }

    fn input(shape: [usize; 4]) -> Tensor<4> {
        let values: Vec<f64> = (0..shape.iter().product())
            .map(|i| (i as f64).sin())
            .collect();
        Tensor::from_data(
            TensorData::new(values, shape),
            (&Device::flex(), DType::F64),
        )
    }

    fn largest(x: Tensor<4>) -> f64 {
        x.abs().max().into_scalar::<f64>()
    }

    #[test]
    fn a_turn_follows_the_formula() {
        let x = Tensor::<4>::from_data(
            TensorData::new(vec![1.0f64, 0.0, 1.0, 0.0], [1, 1, 2, 2]),
            (&Device::flex(), DType::F64),
        );
        let turned: Vec<f64> = table(2).turn(x).into_data().try_into_vec().unwrap();
        let expected = [1.0, 0.0, 1f64.cos(), 1f64.sin()];
        assert!(
            turned
                .iter()
                .zip(expected)
                .all(|(a, b)| (a - b).abs() < 1e-15),
            "{turned:?}"
        );
    }

    #[test]
    fn turning_back_undoes_a_turn() {
        let (table, x) = (table(6), input([2, 3, 8, 6]));
        let there_and_back = table.turn_back(table.turn(x.clone()));
        assert!(largest(there_and_back - x) < 1e-14);
    }

    /// What rotary positions are for: products depend on the distance alone.
    #[test]
    fn products_depend_on_the_distance() {
        let (table, row) = (table(8), input([1, 1, 1, 8]));
        let turned = table.turn(row.repeat_dim(2, 10));
        let product = |i: usize, j: usize| {
            let at = |i| turned.clone().narrow(2, i, 1);
            (at(i) * at(j)).sum().into_scalar::<f64>()
        };
        assert!((product(2, 5) - product(6, 9)).abs() < 1e-13);
        assert!((product(2, 5) - product(2, 6)).abs() > 1e-3);
    }
}
