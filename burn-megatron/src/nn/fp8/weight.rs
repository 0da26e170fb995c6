//! Quantized FP8 weights.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::tensor::Tensor;
use burn_megatron_kernels::fp8::{Format, Fp8Matrix, QuantizerUsage};

use super::{Fp8Layer, Operand};

/// The rowwise and the columnwise FP8 copy of a weight `[in, out]`.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// The copy with the layout `[in, out]`, which the gradient of the input uses.
    pub rowwise: Fp8Matrix,
    /// The copy with the layout `[out, in]`, which the output uses.
    pub columnwise: Fp8Matrix,
}

/// A quantizer for the weight of one layer. It is used if sharded weights are all-gathered in FP8.
pub trait WeightQuantizer: Debug + Send + Sync {
    /// Returns the FP8 format of the weight.
    fn format(&self) -> Format;

    /// Returns whether the weight has a single scale. All ranks that hold a part of the weight must then use the same
    /// scale.
    fn has_one_scale(&self) -> bool;

    /// Returns the f32 scale `[1]` of the weight, and records its magnitude for the history. `amax` `[1]` is the
    /// largest f32 magnitude over all ranks that hold a part of the weight. Call this method only if the weight has a
    /// single scale.
    fn scale(&self, amax: Tensor<1>) -> Tensor<1>;

    /// Returns the rowwise and the columnwise FP8 copy of `weight`, which is this tensor rank's part `[in, out]`. If
    /// the weight has a single scale, this call is collective: make it on all ranks of the tensor axis.
    fn quantize(&self, weight: Tensor<2>) -> QuantizedWeight;
}

/// The cached rowwise and columnwise copies of a weight, which are valid until the weight changes.
#[derive(Debug)]
pub(super) struct CachedWeight {
    weight: Arc<QuantizedWeight>,
    /// The statistics of the quantizer and the number of values, until a recorded forward pass uses the weight.
    seen: Option<(Tensor<1>, usize)>,
}

impl Fp8Layer {
    /// Returns whether copies are cached. The caller must then report when weights change.
    pub(in crate::nn) fn caches_weight(&self) -> bool {
        self.shared.model.caches_weights.load(Ordering::Relaxed)
    }

    /// Returns the weight, which is quantized at its first use after a change. If the weight has a single scale, this
    /// use is collective over the tensor axis.
    pub(in crate::nn) fn cached_weight(
        &self,
        value: impl Fn() -> Tensor<2>,
        is_recorded: bool,
    ) -> Arc<QuantizedWeight> {
        let mut cached = self.shared.weight.lock();
        let CachedWeight { weight, seen } = cached.get_or_insert_with(|| {
            let value = value();
            let elements = value.shape().num_elements();
            let (weight, seen) = if is_recorded {
                (self.logged_copies(value), None)
            } else {
                let scale = self.scale_of(Operand::Weight, &value);
                let usage = QuantizerUsage::BOTH;
                let (copies, seen) = self.quantize(Operand::Weight, value, scale.as_ref(), usage);
                (both(copies), Some((seen, elements)))
            };
            let weight = Arc::new(weight);
            CachedWeight { weight, seen }
        });
        if is_recorded {
            if let Some((seen, elements)) = seen.take() {
                self.log(Operand::Weight, seen, elements);
            }
            self.measure(Operand::Weight, value, &weight.rowwise);
        }
        weight.clone()
    }

    /// Drops the cached copies.
    pub(super) fn drop_cached_weight(&self) {
        *self.shared.weight.lock() = None;
    }

    /// Returns the rowwise and the columnwise copy, and adds the magnitudes to the log of this step.
    fn logged_copies(&self, weight: Tensor<2>) -> QuantizedWeight {
        let scale = self.scale_of(Operand::Weight, &weight);
        let usage = QuantizerUsage::BOTH;
        both(self.quantize_logged(Operand::Weight, weight.into(), scale.as_ref(), usage))
    }
}

fn both([rowwise, columnwise]: [Option<Fp8Matrix>; 2]) -> QuantizedWeight {
    QuantizedWeight {
        rowwise: expect_copy(rowwise),
        columnwise: expect_copy(columnwise),
    }
}

/// Returns a copy that the quantizer was asked for.
pub(super) fn expect_copy(copy: Option<Fp8Matrix>) -> Fp8Matrix {
    match copy {
        Some(copy) => copy,
        None => unreachable!("a quantiser returns the copies it is called for"),
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
        self.log(Operand::Weight, amax.clone(), 0);
        self.scale_for(Operand::Weight, amax)
    }

    fn quantize(&self, weight: Tensor<2>) -> QuantizedWeight {
        let copies = self.logged_copies(weight.clone());
        self.measure(Operand::Weight, || weight, &copies.rowwise);
        copies
    }
}
