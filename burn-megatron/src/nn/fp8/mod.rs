//! Linear layers that multiply in 8 bits.
//!
//! A layer brings its input, its weight and the gradient of its output into 8 bits and multiplies
//! these; sums are made in f32, and everything else is in the type of the model. The formulas are those
//! of Transformer Engine. In a model of ours, these are the projections of attention and the two layers
//! of the MLP; the output layer, embeddings, norms and attention itself are not in 8 bits.
//!
//! | recipe | scales | exchanged in a step |
//! |---|---|---|
//! | [delayed](Fp8Recipe::Delayed) | one for a tensor, from the steps before | all magnitudes at once, when it [ends](Fp8::end_step) |
//! | [current](Fp8Recipe::Current) | one for a tensor, from itself | a magnitude where tensor ranks hold parts of one tensor |
//! | [blockwise](Fp8Recipe::Blockwise) | one for 1 x 128 values, of weights for 128 x 128 | nothing |
//! | [MXFP8](Fp8Recipe::MxFp8) | a power of two for 32 values | nothing |
//!
//! # On several ranks
//!
//! - Delayed: scales are constant in a step and the same on all ranks. They depend neither on the
//!   layout nor on the number of micro-batches, nor on what is recomputed.
//! - Current: the scale of a tensor that the ranks of the tensor axis share is that of the whole
//!   tensor: the weight, the input of a row-parallel layer, the gradient of a column-parallel layer's
//!   output. Nothing is exchanged over the data axis, so a micro-batch has the scales that it would have
//!   on one rank.
//! - Blockwise, MXFP8: blocks are those of one rank where each part of a tensor is a multiple of the
//!   block. Where it is not, the last block of each part is a short one, and the values may differ by
//!   the rounding of one scale to another.
//!
//! # A module of your own
//!
//! [`Fp8Linear`] takes the place of burn-nn's `Linear`, with the same record keys. The type of the field
//! has to change: what maps a module (`ModuleMapper`, `Reparameterization`) sees parameters alone, and
//! never the input of a layer nor the gradient of its output, which are quantised too. One line does
//! it where the module says `Linear`:
//!
//! ```
//! use burn_megatron::nn::fp8::Fp8Linear as Linear;
//! # fn unused(_: Linear) {}
//! ```

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

mod arithmetic;
mod check;
mod config;
mod error;
mod history;
mod layer;
mod linear;
mod module;
mod noted;
mod operand;
mod report;
mod setting;
mod state;
mod step;
mod weight;

pub(super) use arithmetic::In8Bits;
pub use config::{
    AmaxChoice, BlockScaling, CurrentScaling, DelayedScaling, Fp8Config, Fp8Format, Fp8Layers,
    Fp8Recipe,
};
pub use error::Fp8Error;
pub use history::ScaleState;
use layer::Flags;
pub use layer::Fp8Layer;
pub use linear::{Fp8Linear, Fp8LinearConfig, MxFp8Linear, MxFp8LinearConfig};
pub use operand::Operand;
pub(crate) use operand::Split;
pub use report::OperandReport;
pub use setting::UnknownRecipe;
pub use state::Fp8LayerState;
pub use weight::{QuantizedWeight, WeightQuantizer};

use crate::collective::Comm;
use crate::comm::{Buffer, Groups, ReduceOp};
use crate::glob::{Glob, nearest};

/// The 8-bit layers of one rank's part of a model. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct Fp8 {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    config: Fp8Config,
    /// The patterns of the config.
    globs: Vec<Glob>,
    flags: Arc<Flags>,
    /// In the order in which they were built.
    layers: Mutex<Vec<Fp8Layer>>,
    /// The paths of all layers that could compute in 8 bits.
    possible: Mutex<Vec<String>>,
}

impl Fp8 {
    /// The layers of a model, none of which is built yet.
    ///
    /// # Errors
    ///
    /// [`Fp8Error`] for settings without a meaning.
    pub fn new(config: &Fp8Config) -> Result<Self, Fp8Error> {
        config.check()?;
        let shared = Shared {
            globs: config.globs()?,
            config: config.clone(),
            ..Shared::default()
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The settings.
    pub fn config(&self) -> &Fp8Config {
        &self.shared.config
    }

    /// The recipe of the layer at `path`, such as `blocks.0.mlp.up`; without one it computes in the
    /// type of the model.
    pub fn recipe(&self, path: &str) -> Option<Fp8Recipe> {
        let layers = self.config().layers.iter().zip(&self.shared.globs);
        match layers.rev().find(|(_, glob)| glob.fits(path)) {
            Some((layers, _)) => layers.recipe,
            None => self.config().recipe,
        }
    }

    /// The layers, in the order in which they were built.
    pub fn layers(&self) -> Vec<Fp8Layer> {
        lock(&self.shared.layers).clone()
    }

    /// The paths of the weights in 8 bits, such as `blocks.0.mlp.up.weight`, each with how it is
    /// quantised.
    pub fn weights(&self) -> Vec<(String, Arc<dyn WeightQuantizer>)> {
        let weight = |layer: Fp8Layer| {
            let path = format!("{}.weight", layer.path());
            (path, Arc::new(layer) as Arc<dyn WeightQuantizer>)
        };
        self.layers().into_iter().map(weight).collect()
    }

    /// Says whether somebody tells [when weights change](Self::weights_changed). From then on a weight
    /// behind a [`Door`](super::door::Door) is quantised when it is used for the first time after a
    /// change, and both copies are kept: two bytes for an element. Otherwise nothing is kept, and each
    /// use quantises anew.
    pub fn manage_weights(&self, managed: bool) {
        self.shared.flags.managed.store(managed, Ordering::Relaxed);
        self.weights_changed();
    }

    /// Weights are other ones than before.
    pub fn weights_changed(&self) {
        self.layers().iter().for_each(Fp8Layer::forget_weight);
    }

    /// Says whether tensors are compared with their codes: from now on the first use of each tensor of
    /// a layer in a step, in a forward that is recorded and in its backward. Each comparison waits for the
    /// device. A weight whose codes a store gathers with one scale is not compared.
    pub fn measure(&self, measuring: bool) {
        self.shared
            .flags
            .measuring
            .store(measuring, Ordering::Relaxed);
    }

    /// What was found last, in the order of the layers: input, weight, gradient. It is of this rank's
    /// part of each tensor.
    pub fn report(&self) -> Vec<OperandReport> {
        let reports = |layer: Fp8Layer| layer.state().each_ref().map(|of| of.report.clone());
        self.layers()
            .into_iter()
            .flat_map(reports)
            .flatten()
            .collect()
    }

    /// Checks that each pattern fits a layer of the model. Every rank of the pipeline must come.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Unmatched`] with the nearest paths of this rank.
    pub fn check_layers(&self, groups: &Groups) -> Result<(), Fp8Error> {
        if self.shared.globs.is_empty() {
            return Ok(());
        }
        let paths = lock(&self.shared.possible).clone();
        let fits_none = |glob: &Glob| !paths.iter().any(|path| glob.fits(path));
        let flags = self
            .shared
            .globs
            .iter()
            .map(|glob| u8::from(fits_none(glob)));
        let flags: Vec<u8> = flags.collect();
        let everywhere = groups
            .pipeline()
            .all_reduce(Buffer::from(flags), ReduceOp::Min)?;
        let everywhere = match everywhere {
            Buffer::U8(flags) => flags,
            other => unreachable!("u8 went in, {} came out", other.dtype()),
        };
        match everywhere.iter().position(|unmatched| *unmatched == 1) {
            Some(at) => Err(Fp8Error::Unmatched {
                pattern: self.config().layers[at].pattern.clone(),
                nearest: nearest(&self.shared.globs[at], paths.iter().map(String::as_str)),
            }),
            None => Ok(()),
        }
    }

    /// The 8-bit arithmetic of the layer at `path`, if its recipe and `wanted` say so.
    pub(crate) fn layer(
        &self,
        path: &str,
        comm: &Comm,
        split: Split,
        wanted: bool,
    ) -> Result<Option<Fp8Layer>, Fp8Error> {
        lock(&self.shared.possible).push(path.into());
        let Some(recipe) = self.recipe(path).filter(|_| wanted) else {
            return Ok(None);
        };
        let mut layers = lock(&self.shared.layers);
        if layers.iter().any(|layer| layer.path() == path) {
            return Err(Fp8Error::Twice { path: path.into() });
        }
        let (config, flags) = (self.config(), self.shared.flags.clone());
        let layer = Fp8Layer::new(path, recipe, config, flags, (comm.clone(), split));
        layers.push(layer.clone());
        Ok(Some(layer))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
