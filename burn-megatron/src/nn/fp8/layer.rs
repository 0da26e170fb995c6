//! The 8-bit state of one linear layer, beside its parameters.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::fp8::{
    self, BLOCK, CurrentScale, Format, Fp8Matrix, Quantized, QuantizerUsage, Scales, Scaling,
};
use parking_lot::{Mutex, MutexGuard};

use super::amax_log::AmaxLog;
use super::config::{Fp8Config, Fp8Recipe};
use super::history::AmaxHistory;
use super::operand::{Operand, SplitOperands};
use super::report::{MeasuredError, OperandReport};
use super::weight::CachedWeight;
use crate::collective::{Comm, start_all_reduce};
use crate::comm::ReduceOp;

/// The 8-bit arithmetic of one linear layer: its recipe, and the scales and histories of its three
/// tensors.
///
/// Clones share one state, also those that [`valid`](burn::module::Module::valid),
/// [`fork`](burn::module::Module::fork) and the like return. With delayed scaling the state is a part of
/// the layer's record; see [`into_record`](burn::module::Module::into_record).
#[derive(Clone)]
pub struct Fp8Layer {
    pub(super) shared: Arc<Fp8LayerShared>,
}

pub(super) struct Fp8LayerShared {
    pub id: ParamId,
    pub path: String,
    pub recipe: Fp8Recipe,
    /// Formats of values and of gradients.
    formats: [Format; 2],
    pub save_activations: bool,
    /// The tensor group, and which tensors are split over it.
    comm: Comm,
    split: SplitOperands,
    pub flags: Arc<Fp8Flags>,
    operands: Mutex<[OperandState; 3]>,
    pub weight: Mutex<Option<CachedWeight>>,
}

/// Settings that the layers of a model share.
#[derive(Debug, Default)]
pub(super) struct Fp8Flags {
    /// Quantised weights are cached: the caller reports when weights change.
    pub caches_weights: AtomicBool,
    /// Quantisation errors are measured.
    pub measuring: AtomicBool,
}

/// The state of one operand.
pub(super) struct OperandState {
    /// With delayed scaling.
    pub history: Option<AmaxHistory>,
    /// Its scale, on the device.
    scale: Option<Tensor<1>>,
    /// Its magnitudes in this step.
    pub amax_log: AmaxLog,
    /// Its last measured quantisation error, and whether it was measured in this step.
    pub report: Option<OperandReport>,
    pub is_measured: bool,
    /// Whether a warning was given since its saturation last was below the limit.
    pub is_warned: bool,
}

impl OperandState {
    /// Drops the cached scale, after the history changed.
    pub fn drop_scale(&mut self) {
        self.scale = None;
    }
}

impl Fp8Layer {
    pub(super) fn new(
        path: &str,
        recipe: Fp8Recipe,
        config: &Fp8Config,
        flags: Arc<Fp8Flags>,
        (comm, split): (Comm, SplitOperands),
    ) -> Self {
        let formats = config.format.of(&recipe);
        let state = |operand| OperandState {
            history: match recipe {
                Fp8Recipe::Delayed(settings) => {
                    Some(AmaxHistory::new(settings, of(formats, operand).max()))
                }
                _ => None,
            },
            scale: None,
            amax_log: AmaxLog::default(),
            report: None,
            is_measured: false,
            is_warned: false,
        };
        let shared = Fp8LayerShared {
            id: ParamId::new(),
            path: path.into(),
            recipe,
            formats,
            save_activations: config.save_activations,
            comm,
            split,
            flags,
            operands: Mutex::new(Operand::ALL.map(state)),
            weight: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Its path in the model, such as `blocks.0.mlp.up`.
    pub fn path(&self) -> &str {
        &self.shared.path
    }

    /// How its scales are found.
    pub fn recipe(&self) -> &Fp8Recipe {
        &self.shared.recipe
    }

    /// The format of an operand's codes.
    pub fn format(&self, operand: Operand) -> Format {
        of(self.shared.formats, operand)
    }

    /// Whether tensors have one scale each.
    pub(super) fn has_one_scale(&self) -> bool {
        matches!(
            self.shared.recipe,
            Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_)
        )
    }

    pub(super) fn state(&self) -> MutexGuard<'_, [OperandState; 3]> {
        self.shared.operands.lock()
    }

    /// The scale of this tensor, where it has one scale. Collective with current scaling: call on all
    /// ranks that hold parts of the tensor.
    pub(super) fn scale_of(&self, operand: Operand, x: &Tensor<2>) -> Option<Tensor<1>> {
        match &self.shared.recipe {
            Fp8Recipe::Delayed(_) => Some(self.delayed(operand, &x.device())),
            Fp8Recipe::Current(_) => {
                let local_amax = fp8::amax(x.clone());
                let comm = &self.shared.comm;
                let amax = if self.shared.split.is_split(operand) && comm.size() > 1 {
                    start_all_reduce(local_amax, ReduceOp::Max, comm).wait()
                } else {
                    local_amax
                };
                Some(self.scale_for(operand, amax))
            }
            Fp8Recipe::Blockwise(_) | Fp8Recipe::MxFp8 => None,
        }
    }

    /// The scale of a tensor with this largest magnitude.
    pub(super) fn scale_for(&self, operand: Operand, amax: Tensor<1>) -> Tensor<1> {
        match &self.shared.recipe {
            Fp8Recipe::Current(settings) => {
                let options = CurrentScale {
                    epsilon: settings.epsilon,
                    power_of_two: settings.power_of_two,
                };
                fp8::current_scale(amax, self.format(operand), options)
            }
            _ => self.delayed(operand, &amax.device()),
        }
    }

    /// The scale that follows from earlier steps; 1 where there is no history.
    fn delayed(&self, operand: Operand, device: &Device) -> Tensor<1> {
        let state = &mut self.state()[operand as usize];
        if let Some(scale) = state
            .scale
            .as_ref()
            .filter(|scale| scale.device() == *device)
        {
            return scale.clone();
        }
        let scale = state.history.as_ref().map_or(1.0, AmaxHistory::scale);
        let scale = Tensor::from_floats([scale], device);
        state.scale = Some(scale.clone());
        scale
    }

    /// Copies of a tensor, with the scale of [`scale_of`](Self::scale_of).
    pub(super) fn quantize(
        &self,
        operand: Operand,
        x: Tensor<2>,
        scale: Option<&Tensor<1>>,
        usage: QuantizerUsage,
    ) -> Quantized {
        let scaling = match (scale, &self.shared.recipe) {
            (Some(scale), _) => Scaling::Tensor(scale.clone()),
            (None, Fp8Recipe::Blockwise(settings)) => Scaling::Blocks {
                square: operand == Operand::Weight,
                power_of_two: settings.power_of_two,
            },
            (None, Fp8Recipe::MxFp8) => Scaling::Mx,
            (None, _) => unreachable!("a recipe with one scale per tensor passes it"),
        };
        fp8::quantize(x, self.format(operand), &scaling, usage)
    }

    /// A matrix from its codes and scales, as [`Fp8Matrix::tensors`] gives them.
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

    /// Records the statistics of a quantiser over `elements` values.
    pub(super) fn record(&self, operand: Operand, seen: Tensor<1>, elements: usize) {
        self.state()[operand as usize].amax_log.push(seen, elements);
    }

    /// Measures the quantisation error of a tensor, if measuring is on and this is its first use in this
    /// step. `x` returns the tensor in the layout of the copy.
    pub(super) fn measure(
        &self,
        operand: Operand,
        x: impl FnOnce() -> Tensor<2>,
        copy: &Fp8Matrix,
    ) {
        let is_due = self.shared.flags.measuring.load(Ordering::Relaxed)
            && !self.state()[operand as usize].is_measured;
        if !is_due {
            return;
        }
        let measured = MeasuredError::new(x(), copy);
        let state = &mut self.state()[operand as usize];
        state.is_measured = true;
        state.report = Some(measured.report(self, operand));
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
