//! Tokens, numbers and parameters that differ by position, without random numbers.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron_models::TransformerConfig;

/// Returns two samples, `[2, context]`, that differ by `key`.
pub fn tokens(config: &TransformerConfig, key: usize, device: &Device) -> Tensor<2, Int> {
    let shape = [2, config.context];
    let token = |i: usize| ((i * i * 7 + key * 31 + i) % config.vocabulary) as i64;
    let data = (0..shape[0] * shape[1]).map(token).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(data, shape), device)
}

/// Returns element `i` of a smooth sequence.
pub fn wave(i: usize, phase: f64) -> f64 {
    0.5 * (phase + 1.3 * i as f64).sin() + 0.2 * (2.0 * phase + i as f64).cos()
}

/// Sets each parameter, in f64, to a [`wave`] with a different phase.
pub fn fill<M: Module>(module: M, phase: f64) -> M {
    module.map(&mut Fill(phase))
}

struct Fill(f64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 10.0;
        param.map(|tensor| {
            let (shape, device) = (tensor.dims(), tensor.device());
            let all = 0..shape.iter().product();
            let values: Vec<f64> = all.map(|i| wave(i, self.0)).collect();
            let filled = Tensor::from_data(TensorData::new(values, shape), (&device, DType::F64));
            if tensor.is_require_grad() {
                filled.require_grad()
            } else {
                filled
            }
        })
    }
}
