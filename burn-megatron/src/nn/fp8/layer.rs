//! What one linear layer has beside its parameters to compute in 8 bits.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use burn_megatron_kernels::fp8::{
    self, BLOCK, CurrentScale, Format, Fp8Matrix, Quantized, Scales, Scaling, Ways,
};

use super::config::{Fp8Config, Fp8Recipe};
use super::history::AmaxHistory;
use super::noted::Noted;
use super::operand::{Operand, Split};
use super::report::{Measured, OperandReport};
use super::weight::KeptWeight;
use crate::collective::{Comm, start_all_reduce};
use crate::comm::ReduceOp;

/// The 8-bit arithmetic of one linear layer: its recipe, and the scales and histories of its three
/// tensors.
///
/// Clones are handles to one state, as a clone of a module is the same layer, and so are what
/// [`valid`](burn::module::Module::valid), [`fork`](burn::module::Module::fork) and the like give. With
/// delayed scaling the state is a part of the layer's record; see
/// [`into_record`](burn::module::Module::into_record).
#[derive(Clone)]
pub struct Fp8Layer {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub id: ParamId,
    pub path: String,
    pub recipe: Fp8Recipe,
    /// Of values and of gradients.
    formats: [Format; 2],
    pub save_activations: bool,
    /// The ranks of the tensor axis, and which tensors they have parts of.
    comm: Comm,
    split: Split,
    pub flags: Arc<Flags>,
    operands: Mutex<[State; 3]>,
    pub weight: Mutex<Option<KeptWeight>>,
}

/// What all layers of a model are told.
#[derive(Debug, Default)]
pub(super) struct Flags {
    /// Somebody says when weights change.
    pub managed: AtomicBool,
    /// Tensors are compared with their codes.
    pub measuring: AtomicBool,
}

/// What is known of one operand.
pub(super) struct State {
    /// With delayed scaling.
    pub history: Option<AmaxHistory>,
    /// Its scale, on the device.
    scale: Option<Tensor<1>>,
    /// What was seen of it in this step.
    pub noted: Noted,
    /// What it was compared with its codes for last, and whether that was in this step.
    pub report: Option<OperandReport>,
    pub is_measured: bool,
    /// Whether it was warned of since it last was below the limit.
    pub is_warned: bool,
}

impl State {
    /// Says that the scale is another one.
    pub fn rescaled(&mut self) {
        self.scale = None;
    }
}

impl Fp8Layer {
    pub(super) fn new(
        path: &str,
        recipe: Fp8Recipe,
        config: &Fp8Config,
        flags: Arc<Flags>,
        (comm, split): (Comm, Split),
    ) -> Self {
        let formats = config.format.of(&recipe);
        let state = |operand| State {
            history: match recipe {
                Fp8Recipe::Delayed(settings) => {
                    Some(AmaxHistory::new(settings, of(formats, operand).max()))
                }
                _ => None,
            },
            scale: None,
            noted: Noted::default(),
            report: None,
            is_measured: false,
            is_warned: false,
        };
        let shared = Shared {
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

    pub(super) fn state(&self) -> MutexGuard<'_, [State; 3]> {
        let operands = self.shared.operands.lock();
        operands.unwrap_or_else(PoisonError::into_inner)
    }

    /// What the values of this tensor are multiplied with, where it has one scale. With current scaling
    /// the ranks that hold parts of the tensor must all come.
    pub(super) fn scale_of(&self, operand: Operand, x: &Tensor<2>) -> Option<Tensor<1>> {
        match &self.shared.recipe {
            Fp8Recipe::Delayed(_) => Some(self.delayed(operand, &x.device())),
            Fp8Recipe::Current(_) => {
                let amax = fp8::amax(x.clone());
                let amax = match self.shared.split.is(operand) && self.shared.comm.size() > 1 {
                    true => start_all_reduce(amax, ReduceOp::Max, &self.shared.comm).wait(),
                    false => amax,
                };
                Some(self.scale_for(operand, amax))
            }
            Fp8Recipe::Blockwise(_) | Fp8Recipe::MxFp8 => None,
        }
    }

    /// What the values of a tensor with this largest magnitude are multiplied with.
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
        if let Some(scale) = state.scale.as_ref().filter(|kept| kept.device() == *device) {
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
        ways: Ways,
    ) -> Quantized {
        let scaling = match (scale, &self.shared.recipe) {
            (Some(scale), _) => Scaling::Tensor(scale.clone()),
            (None, Fp8Recipe::Blockwise(settings)) => Scaling::Blocks {
                square: operand == Operand::Weight,
                power_of_two: settings.power_of_two,
            },
            (None, Fp8Recipe::MxFp8) => Scaling::Mx,
            (None, _) => unreachable!("a tensor with one scale is given it"),
        };
        fp8::quantize(x, self.format(operand), &scaling, ways)
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

    /// Notes what a quantiser has seen of `elements` values.
    pub(super) fn note(&self, operand: Operand, seen: Tensor<1>, elements: usize) {
        self.state()[operand as usize].noted.push(seen, elements);
    }

    /// Compares a tensor with its copy, if that is wanted and was not done in this step. `x` gives it as
    /// the copy lies.
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
        let measured = Measured::new(x(), copy);
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
        let Shared { path, recipe, .. } = &*self.shared;
        write!(f, "{path} in 8 bits, {recipe:?}")
    }
}
