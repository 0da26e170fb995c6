//! The FP8 state of one linear layer, separate from its parameters.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::fp8::{
    self, BLOCK, CurrentScale, Format, Fp8Matrix, MX_BLOCK, QuantizerInput, QuantizerUsage,
    ROW_BYTES, Scales, Scaling, log_magnitude,
};
use parking_lot::{Mutex, MutexGuard};

use super::buffers::OperandBuffers;
use super::config::{Fp8Config, Fp8Recipe};
use super::operand::{Operand, SplitOperands};
use super::report::OperandReport;
use super::weight::CachedWeight;
use crate::collective::{CollectiveOp, Comm, start};
use crate::comm::ReduceOp;

/// The FP8 state of one linear layer: its recipe, and the scales and histories of its input, weight and output
/// gradient.
///
/// Clones share one state, including clones from [`valid`](burn::module::Module::valid),
/// [`fork`](burn::module::Module::fork) and similar methods. With delayed scaling the state is part of the record of
/// the layer. See [`into_record`](burn::module::Module::into_record).
#[derive(Clone)]
pub struct Fp8Layer {
    pub(super) shared: Arc<Fp8LayerShared>,
}

pub(super) struct Fp8LayerShared {
    pub id: ParamId,
    pub path: String,
    pub recipe: Fp8Recipe,
    /// The formats of values and of gradients.
    formats: [Format; 2],
    pub save_activations: bool,
    /// The group of the tensor ranks of the layer, and the operands that are split over it.
    comm: Comm,
    split: SplitOperands,
    pub owner: WeightOwner,
    pub model: Arc<ModelFp8>,
    /// The slot of the input. The slots of the weight and the gradient follow.
    pub first_slot: usize,
    operands: Mutex<[OperandState; 3]>,
    pub weight: Mutex<Option<CachedWeight>>,
}

/// The owner of the parameter that holds the weight of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightOwner {
    /// The layer owns its parameter `weight`.
    Layer,
    /// One parameter holds the weights of all experts.
    Experts,
}

/// The state that the layers of a model share.
#[derive(Debug, Default)]
pub(super) struct ModelFp8 {
    /// Magnitudes and scales.
    pub buffers: OperandBuffers,
    /// Whether quantized weights are cached. The caller must then call `invalidate_weights` when weights change.
    pub caches_weights: AtomicBool,
    /// Whether quantization errors are measured.
    pub measuring: AtomicBool,
}

/// The host state of one operand.
#[derive(Default)]
pub(super) struct OperandState {
    /// The last measured quantization error. `is_measured` is true if it was measured in this step.
    pub report: Option<OperandReport>,
    pub is_measured: bool,
    /// Whether a warning has been given since the saturation was last below the limit.
    pub is_warned: bool,
}

/// The scale of a tensor, as an element of a buffer.
#[derive(Clone)]
pub(super) struct TensorScale {
    pub scales: Tensor<1>,
    index: usize,
}

impl Fp8Layer {
    pub(super) fn new(
        path: &str,
        recipe: Fp8Recipe,
        config: &Fp8Config,
        (model, device): (Arc<ModelFp8>, &Device),
        (comm, split, owner): (Comm, SplitOperands, WeightOwner),
    ) -> Self {
        let formats = config.format.of(&recipe);
        let rule = |operand| match recipe {
            Fp8Recipe::Delayed(settings) => Some(settings.rule(of(formats, operand).max())),
            _ => None,
        };
        let shared = Fp8LayerShared {
            id: ParamId::new(),
            path: path.into(),
            recipe,
            formats,
            save_activations: config.save_activations,
            comm,
            split,
            owner,
            first_slot: model.buffers.add(Operand::ALL.map(rule), device),
            model,
            operands: Mutex::default(),
            weight: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Returns the path of the layer in the model, such as `blocks.0.mlp.up`.
    pub fn path(&self) -> &str {
        &self.shared.path
    }

    /// Returns the scaling recipe.
    pub fn recipe(&self) -> &Fp8Recipe {
        &self.shared.recipe
    }

    /// Returns the FP8 format of an operand.
    pub fn format(&self, operand: Operand) -> Format {
        of(self.shared.formats, operand)
    }

    /// Returns whether each tensor has a single scale.
    pub(super) fn has_one_scale(&self) -> bool {
        matches!(
            self.shared.recipe,
            Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_)
        )
    }

    /// Returns whether the quantizer can compute an activation while it reads its input. The quantizer reads its input
    /// only once if the scales are already available, or if each scale belongs to a few values.
    pub(in crate::nn) fn quantizes_activations(&self) -> bool {
        self.shared.save_activations && !matches!(self.shared.recipe, Fp8Recipe::Current(_))
    }

    /// Returns the number that must divide the number of input rows, so that tensor cores can compute the matmuls.
    /// cuBLASLt requires this for the rows of an operand. For MXFP8, the sum over rows must cover complete blocks.
    pub(in crate::nn) fn row_multiple(&self) -> usize {
        match self.shared.recipe {
            Fp8Recipe::MxFp8 => MX_BLOCK,
            _ => ROW_BYTES,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, [OperandState; 3]> {
        self.shared.operands.lock()
    }

    /// Returns the slot of an operand in the buffers of the model.
    fn slot(&self, operand: Operand) -> usize {
        self.shared.first_slot + operand as usize
    }

    /// Returns the scale of this tensor, or `None` if the recipe has several scales per tensor. With current scaling
    /// this call is collective: make it on all ranks that hold parts of the tensor.
    pub(super) fn scale_of(&self, operand: Operand, x: &Tensor<2>) -> Option<TensorScale> {
        let scales = match &self.shared.recipe {
            Fp8Recipe::Delayed(_) => self.shared.model.buffers.scales(&x.device()),
            Fp8Recipe::Current(_) => {
                let op = if self.shared.split.is_split(operand) {
                    CollectiveOp::AllReduce(ReduceOp::Max)
                } else {
                    CollectiveOp::Identity
                };
                let amax = start(fp8::amax(x.clone()), &op, &self.shared.comm).wait();
                self.scale_for(operand, amax)
            }
            Fp8Recipe::Blockwise(_) | Fp8Recipe::MxFp8 => return None,
        };
        Some(self.scale_in(operand, scales))
    }

    /// Returns the scale of a tensor in the buffer that [`scale_of`](Self::scale_of) returned for it.
    pub(super) fn scale_in(&self, operand: Operand, scales: Tensor<1>) -> TensorScale {
        let index = match &self.shared.recipe {
            Fp8Recipe::Delayed(_) => self.slot(operand),
            _ => 0,
        };
        TensorScale { scales, index }
    }

    /// Returns the scale `[1]` of a tensor with this largest magnitude.
    pub(super) fn scale_for(&self, operand: Operand, amax: Tensor<1>) -> Tensor<1> {
        match &self.shared.recipe {
            Fp8Recipe::Current(settings) => {
                let options = CurrentScale {
                    epsilon: settings.epsilon,
                    power_of_two: settings.power_of_two,
                };
                fp8::current_scale(amax, self.format(operand), options)
            }
            _ => {
                let scales = self.shared.model.buffers.scales(&amax.device());
                scales.narrow(0, self.slot(operand), 1)
            }
        }
    }

    fn scaling(&self, operand: Operand, scale: Option<&TensorScale>) -> Scaling {
        match (scale.cloned(), &self.shared.recipe) {
            (Some(TensorScale { scales, index }), _) => Scaling::Element { scales, index },
            (None, Fp8Recipe::Blockwise(settings)) => Scaling::Blocks {
                square: operand == Operand::Weight,
                power_of_two: settings.power_of_two,
            },
            (None, Fp8Recipe::MxFp8) => Scaling::Mx,
            (None, _) => unreachable!("a recipe with one scale per tensor passes it"),
        }
    }

    /// Returns the rowwise and columnwise copies of a tensor, with the scale of [`scale_of`](Self::scale_of), and the
    /// statistics of the quantizer.
    pub(super) fn quantize(
        &self,
        operand: Operand,
        x: impl Into<QuantizerInput>,
        scale: Option<&TensorScale>,
        usage: QuantizerUsage,
    ) -> ([Option<Fp8Matrix>; 2], Tensor<1>) {
        let scaling = self.scaling(operand, scale);
        let copies = fp8::quantize(x, self.format(operand), &scaling, usage);
        ([copies.rowwise, copies.columnwise], copies.seen)
    }

    /// Returns the same copies as `quantize`, and adds the magnitudes of the tensor to the log of this step.
    pub(super) fn quantize_logged(
        &self,
        operand: Operand,
        x: QuantizerInput,
        scale: Option<&TensorScale>,
        usage: QuantizerUsage,
    ) -> [Option<Fp8Matrix>; 2] {
        let (format, slot) = (self.format(operand), self.slot(operand));
        let scaling = self.scaling(operand, scale);
        self.shared.model.buffers.log(&x.device(), |log| {
            let copies = fp8::quantize_logged(x, format, &scaling, usage, log, slot);
            ([copies.rowwise, copies.columnwise], copies.seen)
        })
    }

    /// Adds earlier statistics of a quantizer over `elements` values to the log of this step.
    pub(super) fn log(&self, operand: Operand, seen: Tensor<1>, elements: usize) {
        let slot = self.slot(operand);
        let buffers = &self.shared.model.buffers;
        buffers.log(&seen.device(), |log| {
            ((), log_magnitude(log, slot, seen, elements))
        });
    }

    /// Returns the matrix of these codes and scales, as returned by [`Fp8Matrix::tensors`].
    pub(super) fn matrix(
        &self,
        operand: Operand,
        [codes, scales]: [DispatchTensor; 2],
        depth: usize,
    ) -> Fp8Matrix {
        let scales = match &self.shared.recipe {
            Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_) => {
                Scales::Tensor(Tensor::from_dispatch(scales))
            }
            Fp8Recipe::Blockwise(_) => Scales::Blocks {
                scales: Tensor::from_dispatch(scales),
                height: if operand == Operand::Weight { BLOCK } else { 1 },
            },
            Fp8Recipe::MxFp8 => Scales::Mx(Tensor::from_dispatch(scales)),
        };
        Fp8Matrix {
            codes: Tensor::from_dispatch(codes),
            scales,
            format: self.format(operand),
            depth,
        }
    }

    /// Measures the quantization error of a tensor, if measuring is on and this is its first use in this step. `x`
    /// returns the tensor in the layout of the copy.
    pub(super) fn measure(
        &self,
        operand: Operand,
        x: impl FnOnce() -> Tensor<2>,
        copy: &Fp8Matrix,
    ) {
        let is_due = self.shared.model.measuring.load(Ordering::Relaxed)
            && !self.state()[operand as usize].is_measured;
        if !is_due {
            return;
        }
        let report = OperandReport::new(self, operand, x(), copy);
        let state = &mut self.state()[operand as usize];
        state.is_measured = true;
        state.report = Some(report);
    }
}

fn of(formats: [Format; 2], operand: Operand) -> Format {
    match operand {
        Operand::Input | Operand::Weight => formats[0],
        Operand::Gradient => formats[1],
    }
}

impl fmt::Debug for Fp8Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fp8LayerShared { path, recipe, .. } = &*self.shared;
        write!(f, "{path} in 8 bits, {recipe:?}")
    }
}
