//! FP8 training of linear layers.
//!
//! An FP8 layer quantizes its input, its weight and the gradient of its output to FP8, and multiplies the quantized
//! tensors. The matmuls accumulate in f32, and all other operations are in the dtype of the model. The formulas follow
//! Transformer Engine. In the models of this crate, FP8 applies to the attention projections, the two layers of the
//! MLP, and the layers of each [expert](super::moe::Experts). The output layer, embeddings, norms, routers and
//! attention scores do not use FP8.
//!
//! | recipe | scales | communication per step |
//! |---|---|---|
//! | [delayed](Fp8Recipe::Delayed) | one per tensor, from the magnitudes of previous steps | one all-gather of all magnitudes at the [end of the step](Fp8::end_step) |
//! | [current](Fp8Recipe::Current) | one per tensor, from the magnitude of the tensor itself | one magnitude per tensor that is split over the tensor axis |
//! | [blockwise](Fp8Recipe::Blockwise) | one per 1 x 128 block, for weights one per 128 x 128 block | none |
//! | [MXFP8](Fp8Recipe::MxFp8) | one per 32 values, a power of two | none |
//!
//! # On several ranks
//!
//! - Delayed scaling: the scales are constant within a step, and are the same on all ranks. They do not depend on the
//!   layout, the number of micro-batches or recomputation.
//! - Current scaling: a tensor that is split over the tensor axis has the scale of the full tensor. This applies to the
//!   weight, the input of a row-parallel layer, and the output gradient of a column-parallel layer. There is no
//!   communication over the data axis. A micro-batch therefore has the same scales as in a run on one rank.
//! - Blockwise scaling and MXFP8: blocks are the same as on one rank if the size of each part of a tensor is a multiple
//!   of the block size. Otherwise the last block of each part is shorter and may have a different scale, so that its
//!   values are rounded differently.
//! - Experts process tokens of several ranks together, and therefore tokens of several micro-batches. With recipes
//!   other than delayed scaling, the results of experts differ from the results on a single rank by rounding.
//!
//! # Custom modules
//!
//! [`Fp8Linear`] is a drop-in replacement for burn-nn's `Linear`, and its record has the same keys. To use it, change
//! the type of the field in the module. A `ModuleMapper` or a `Reparameterization` is not sufficient: it only gets the
//! parameters, but the input and the output gradient of a layer are quantized too. To change the type of all fields,
//! one line in the source file of the module is enough:
//!
//! ```
//! use burn_megatron::nn::fp8::Fp8Linear as Linear;
//! # fn unused(_: Linear) {}
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

mod activated;
mod arithmetic;
mod buffers;
mod check;
mod config;
mod error;
mod history;
mod layer;
mod linear;
mod module;
mod operand;
mod recipe;
mod report;
mod state;
mod step;
mod weight;

pub(super) use activated::ActivatedLinear;
pub(super) use arithmetic::{Fp8Arithmetic, Fp8Gradient};
pub use buffers::Fp8Snapshot;
use burn::tensor::Device;
pub use config::{
    AmaxAlgorithm, BlockScaling, CurrentScaling, DelayedScaling, Fp8Config, Fp8Format, Fp8Layers,
    Fp8Recipe,
};
pub use error::Fp8Error;
pub use history::ScaleState;
pub use layer::Fp8Layer;
use layer::ModelFp8;
pub(crate) use layer::WeightOwner;
pub use linear::{Fp8Linear, Fp8LinearConfig};
pub use operand::Operand;
pub(crate) use operand::SplitOperands;
use parking_lot::Mutex;
pub use recipe::UnknownFp8Recipe;
pub use report::OperandReport;
pub use state::Fp8LayerState;
pub use weight::{QuantizedWeight, WeightQuantizer};

use crate::collective::Comm;
use crate::collective::first_on_all;
use crate::comm::ParallelContext;
use crate::glob::{Glob, nearest};

/// The registry of the FP8 layers of this rank's part of a model. Clones share the registry.
#[derive(Clone, Debug, Default)]
pub struct Fp8 {
    shared: Arc<Fp8Shared>,
}

#[derive(Debug, Default)]
struct Fp8Shared {
    config: Fp8Config,
    /// The patterns of the configuration.
    globs: Vec<Glob>,
    /// The state that the layers share.
    model: Arc<ModelFp8>,
    /// The layers, in build order.
    layers: Mutex<Vec<Fp8Layer>>,
    /// The paths of all layers that can use FP8.
    capable: Mutex<BTreeSet<String>>,
}

impl Fp8 {
    /// Creates an empty registry of the FP8 layers of a model.
    ///
    /// # Errors
    ///
    /// [`Fp8Error`] if a setting is invalid.
    pub fn new(config: &Fp8Config) -> Result<Self, Fp8Error> {
        config.check()?;
        let shared = Fp8Shared {
            globs: config.globs()?,
            config: config.clone(),
            ..Fp8Shared::default()
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the settings.
    pub fn config(&self) -> &Fp8Config {
        &self.shared.config
    }

    /// Returns the recipe of the layer at `path`, such as `blocks.0.mlp.up`. Returns `None` if the layer does not use
    /// FP8.
    pub fn recipe(&self, path: &str) -> Option<Fp8Recipe> {
        let layers = self.config().layers.iter().zip(&self.shared.globs);
        match layers.rev().find(|(_, glob)| glob.matches(path)) {
            Some((layers, _)) => layers.recipe,
            None => self.config().recipe,
        }
    }

    /// Returns the layers, in build order.
    pub fn layers(&self) -> Vec<Fp8Layer> {
        self.shared.layers.lock().clone()
    }

    /// Returns the paths of the weight parameters of FP8 layers, such as `blocks.0.mlp.up.weight`, and their
    /// quantizers. The weights of experts are not included, because one parameter holds the weights of all experts.
    pub fn weights(&self) -> Vec<(String, Arc<dyn WeightQuantizer>)> {
        let weight = |layer: Fp8Layer| {
            let path = format!("{}.weight", layer.path());
            (path, Arc::new(layer) as Arc<dyn WeightQuantizer>)
        };
        let layers = self.layers().into_iter();
        let own = layers.filter(|layer| layer.shared.owner == WeightOwner::Layer);
        own.map(weight).collect()
    }

    /// Turns caching of quantized weights on or off.
    ///
    /// When caching is on, the caller must call [`invalidate_weights`](Self::invalidate_weights) after each change of
    /// the weights. A weight with a [`ParameterHook`](super::hook::ParameterHook) is quantized at its first use after a
    /// change. The rowwise and the columnwise FP8 copy are cached, which takes two bytes per element. When caching is
    /// off, each use quantizes the weight again.
    pub fn cache_quantized_weights(&self, caches: bool) {
        self.shared
            .model
            .caches_weights
            .store(caches, Ordering::Relaxed);
        self.invalidate_weights();
    }

    /// Drops all cached quantized weights. Call this method after the weights have changed.
    pub fn invalidate_weights(&self) {
        self.layers().iter().for_each(Fp8Layer::drop_cached_weight);
    }

    /// Turns measuring of quantization errors on or off. Each tensor of a layer is measured once per step, at its first
    /// use in a forward pass that autodiff records, or in the backward pass. Each measurement synchronizes with the
    /// device. Weights that are gathered in FP8 with a single scale are not measured.
    pub fn measure(&self, measuring: bool) {
        self.shared
            .model
            .measuring
            .store(measuring, Ordering::Relaxed);
    }

    /// Returns the most recent measurement of each tensor, in layer order. The order within a layer is input, weight,
    /// gradient. Each measurement covers this rank's part of the tensor.
    pub fn report(&self) -> Vec<OperandReport> {
        let reports = |layer: Fp8Layer| {
            let operands = layer.state();
            operands.each_ref().map(|operand| operand.report.clone())
        };
        self.layers()
            .into_iter()
            .flat_map(reports)
            .flatten()
            .collect()
    }

    /// Checks that each pattern of the settings matches a layer of the model. This call is collective: make it on all
    /// ranks of the pipeline group.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Unmatched`] if a pattern matches no layer. The error names the most similar paths of this rank.
    pub fn check_layers(&self, groups: &ParallelContext) -> Result<(), Fp8Error> {
        if self.shared.globs.is_empty() {
            return Ok(());
        }
        let paths = self.shared.capable.lock().clone();
        let matches_none = |glob: &Glob| !paths.iter().any(|path| glob.matches(path));
        let flags = self.shared.globs.iter().map(matches_none);
        match first_on_all(flags, groups.pipeline())? {
            Some(at) => Err(Fp8Error::Unmatched {
                pattern: self.config().layers[at].pattern.clone(),
                nearest: nearest(&self.shared.globs[at], paths.iter().map(String::as_str)),
            }),
            None => Ok(()),
        }
    }

    /// Returns the FP8 state of the layer at `path` on `device`, if the layer has a recipe. `comm` contains the ranks
    /// that hold parts of the layer.
    pub(crate) fn layer(
        &self,
        path: &str,
        device: &Device,
        comm: &Comm,
        (split, owner): (SplitOperands, WeightOwner),
    ) -> Result<Option<Fp8Layer>, Fp8Error> {
        let is_new = self.add_capable(path);
        let Some(recipe) = self.recipe(path) else {
            return Ok(None);
        };
        if !is_new {
            return Err(Fp8Error::Duplicate { path: path.into() });
        }
        let (config, model) = (self.config(), self.shared.model.clone());
        let ranks = (comm.clone(), split, owner);
        let layer = Fp8Layer::new(path, recipe, config, (model, device), ranks);
        self.shared.layers.lock().push(layer.clone());
        Ok(Some(layer))
    }

    /// Records that the layer at `path` can use FP8. Returns whether it is the first layer with this path.
    pub(crate) fn add_capable(&self, path: &str) -> bool {
        self.shared.capable.lock().insert(path.into())
    }
}
