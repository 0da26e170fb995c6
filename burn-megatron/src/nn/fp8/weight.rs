//! Weights in 8 bits.

use std::fmt::Debug;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use burn_megatron_kernels::fp8::{Format, Fp8Matrix, Ways};

use super::{Fp8Layer, Operand};

/// Both copies of a weight `[in, out]`.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// `[in, out]`, for the gradient of the input.
    pub rowwise: Fp8Matrix,
    /// `[out, in]`, for the output.
    pub columnwise: Fp8Matrix,
}

/// How the weight of one layer becomes 8 bits: what a store that gathers weights in 8 bits has to know.
pub trait WeightQuantizer: Debug + Send + Sync {
    /// The format of the codes.
    fn format(&self) -> Format;

    /// Whether the weight has one scale, which all ranks that hold a part of it must share.
    fn has_one_scale(&self) -> bool;

    /// What values are multiplied with, `[1]` in f32, for a weight whose largest magnitude on all of
    /// these ranks is `amax`, `[1]` in f32. That magnitude is kept for the history. Only where the weight
    /// has one scale.
    fn scale(&self, amax: Tensor<1>) -> Tensor<1>;

    /// Both copies of this tensor rank's part of the weight, `[in, out]`. Where the weight has one scale,
    /// the ranks of the tensor axis must all come.
    fn quantize(&self, weight: Tensor<2>) -> QuantizedWeight;
}

/// Both copies of a weight that stays as it is.
#[derive(Debug)]
pub(super) struct KeptWeight {
    weight: Arc<QuantizedWeight>,
    /// What the quantiser has seen, until a forward that is recorded uses the weight.
    seen: Option<(Tensor<1>, usize)>,
}

impl Fp8Layer {
    /// Whether a copy can be kept, as somebody says when the weight changes.
    pub(super) fn keeps_weight(&self) -> bool {
        self.shared.flags.managed.load(Ordering::Relaxed)
    }

    /// The weight, quantised when it is asked for the first time since it changed. Where it has one
    /// scale, the ranks of the tensor axis must all come then.
    pub(super) fn kept_weight(
        &self,
        value: impl Fn() -> Tensor<2>,
        is_recorded: bool,
    ) -> Arc<QuantizedWeight> {
        let mut kept = self.lock_weight();
        let KeptWeight { weight, seen } = kept.get_or_insert_with(|| {
            let value = value();
            let elements = value.shape().num_elements();
            let (weight, seen) = self.both_copies(value);
            KeptWeight {
                weight: Arc::new(weight),
                seen: Some((seen, elements)),
            }
        });
        if is_recorded {
            if let Some((seen, elements)) = seen.take() {
                self.note(Operand::Weight, seen, elements);
            }
            self.measure(Operand::Weight, value, &weight.rowwise);
        }
        weight.clone()
    }

    /// Forgets what is kept.
    pub(super) fn forget_weight(&self) {
        *self.lock_weight() = None;
    }

    fn lock_weight(&self) -> MutexGuard<'_, Option<KeptWeight>> {
        let weight = self.shared.weight.lock();
        weight.unwrap_or_else(PoisonError::into_inner)
    }

    fn both_copies(&self, weight: Tensor<2>) -> (QuantizedWeight, Tensor<1>) {
        let scale = self.scale_of(Operand::Weight, &weight);
        let made = self.quantize(Operand::Weight, weight, scale.as_ref(), Ways::BOTH);
        let weight = QuantizedWeight {
            rowwise: asked_for(made.rowwise),
            columnwise: asked_for(made.columnwise),
        };
        (weight, made.seen)
    }
}

/// A copy that the quantiser was asked for.
pub(super) fn asked_for(copy: Option<Fp8Matrix>) -> Fp8Matrix {
    match copy {
        Some(copy) => copy,
        None => unreachable!("a quantiser makes what it is asked for"),
    }
}

impl WeightQuantizer for Fp8Layer {
    fn format(&self) -> Format {
        Fp8Layer::format(self, Operand::Weight)
    }

    fn has_one_scale(&self) -> bool {
        Fp8Layer::has_one_scale(self)
    }

    fn scale(&self, amax: Tensor<1>) -> Tensor<1> {
        let beyond = amax.zeros_like();
        self.note(
            Operand::Weight,
            Tensor::cat(vec![amax.clone(), beyond], 0),
            0,
        );
        self.scale_for(Operand::Weight, amax)
    }

    fn quantize(&self, weight: Tensor<2>) -> QuantizedWeight {
        let elements = weight.shape().num_elements();
        let (copies, seen) = self.both_copies(weight.clone());
        self.note(Operand::Weight, seen, elements);
        self.measure(Operand::Weight, || weight, &copies.rowwise);
        copies
    }
}
