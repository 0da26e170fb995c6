//! The recomputation state of one model: its settings, the regions of its modules, and the current micro-batch.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::layers::LayerRun;
use super::offload::ActivationStore;
use super::{ActivationUsage, RecomputeConfig, RecomputeError, RecomputeModule, recompute_in};
use crate::collective::first_on_all;
use crate::comm::ParallelContext;
use crate::glob::Glob;
use crate::host_link::{OffloadRecord, SimulatedHostLink};
use crate::nn::{DropoutPosition, Residual, forward_context};

/// The activation recomputation of a model: its settings, the list of its recomputation regions, and the current
/// micro-batch. Clones share this state.
#[derive(Clone, Debug)]
pub struct Recompute(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: RecomputeConfig,
    globs: Vec<Glob>,
    /// Whether the micro-batch of the current forward pass is recomputed.
    is_active: AtomicBool,
    regions: Mutex<Regions>,
    /// The store of the inputs of recomputed blocks, if some may be kept on the host.
    store: Option<Arc<ActivationStore>>,
}

/// The modules and paths that a model can recompute.
#[derive(Debug, Default)]
struct Regions {
    modules: BTreeSet<RecomputeModule>,
    paths: BTreeSet<String>,
}

/// Returns the state of a model without recomputation.
impl Default for Recompute {
    fn default() -> Self {
        Self::of(RecomputeConfig::default(), vec![], None)
    }
}

impl Recompute {
    /// Creates the state of a model with these settings.
    ///
    /// # Errors
    ///
    /// The errors of [`RecomputeConfig::check`]. [`RecomputeError::Threads`] if the threads that copy activations to
    /// the host cannot be started.
    pub fn new(config: &RecomputeConfig) -> Result<Self, RecomputeError> {
        config.check()?;
        let store = (config.offload.bytes > 0).then(|| ActivationStore::start(config.offload));
        let store = store.transpose().map_err(|error| RecomputeError::Threads {
            reason: error.to_string(),
        })?;
        Ok(Self::of(
            config.clone(),
            config.globs()?,
            store.map(Arc::new),
        ))
    }

    fn of(config: RecomputeConfig, globs: Vec<Glob>, store: Option<Arc<ActivationStore>>) -> Self {
        Self(Arc::new(Shared {
            config,
            globs,
            is_active: AtomicBool::new(true),
            regions: Mutex::default(),
            store,
        }))
    }

    /// Returns the settings.
    pub fn config(&self) -> &RecomputeConfig {
        &self.0.config
    }

    /// Sets the index of the micro-batch of the next forward pass, in a stage with up to `in_flight` micro-batches in
    /// flight.
    pub fn begin_micro_batch(&self, micro_batch: usize, in_flight: usize) {
        let is_active = self.config().recomputes(micro_batch, in_flight);
        self.0.is_active.store(is_active, Ordering::Relaxed);
        if let Some(store) = &self.0.store {
            store.begin_forward();
        }
    }

    /// Returns the memory usage of the saved inputs of recomputed blocks, on the device and on the host. All values are
    /// 0 if [offloading](super::ActivationOffload) is off.
    pub fn offloaded(&self) -> ActivationUsage {
        let store = self.0.store.as_ref();
        store.map_or_else(ActivationUsage::default, |store| store.usage())
    }

    /// Simulates the transfers of saved inputs over a link between the device and the host, and records them. `forward`
    /// and `backward` are the times of the forward pass and the backward pass of a block.
    pub fn simulate_host_link(
        &self,
        link: SimulatedHostLink,
        forward: Duration,
        backward: Duration,
    ) {
        if let Some(store) = &self.0.store {
            store.simulate(link, forward, backward);
        }
    }

    /// Returns the transfers that were recorded since the last call. The record is empty if no link is
    /// [simulated](Self::simulate_host_link).
    pub fn take_offload_record(&self) -> OffloadRecord {
        let store = self.0.store.as_ref();
        store.map_or_else(OffloadRecord::default, |store| store.take_record())
    }

    /// Returns the region of the module at `path`. It is recomputed if the settings name `module`, or have a pattern
    /// that matches the path.
    pub(crate) fn region(
        &self,
        path: &str,
        module: Option<RecomputeModule>,
        position: &DropoutPosition,
    ) -> RecomputeRegion {
        self.0.regions.lock().paths.insert(path.into());
        let named = module.is_some_and(|module| self.takes(module));
        let matched = || self.0.globs.iter().any(|glob| glob.matches(path));
        self.region_if(named || matched(), position)
    }

    /// Records that the model can recompute `module`. Returns whether the settings name it.
    pub(super) fn takes(&self, module: RecomputeModule) -> bool {
        self.0.regions.lock().modules.insert(module);
        self.config().modules.contains(&module)
    }

    /// Returns a region that is recomputed if the flag is set, independent of names and patterns.
    pub(crate) fn region_if(
        &self,
        is_recomputed: bool,
        position: &DropoutPosition,
    ) -> RecomputeRegion {
        let state = is_recomputed.then(|| (self.clone(), position.clone()));
        RecomputeRegion { state }
    }

    /// Returns the runs of the layers of a stage. `paths` are the paths of the layers.
    pub(crate) fn layer_runs(&self, stage: usize, paths: &[String]) -> Vec<LayerRun> {
        let matches = |path: &String| self.0.globs.iter().any(|glob| glob.matches(path));
        let matches: Vec<_> = paths.iter().map(matches).collect();
        self.0.regions.lock().paths.extend(paths.iter().cloned());
        self.config().runs(stage, &matches)
    }

    /// Checks that each name and each pattern in the settings matches a region of the model. The complete model must be
    /// on this rank.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Unmatched`] if a name or a pattern matches no region. The error lists the regions of the
    /// model.
    pub fn check_whole_model(&self) -> Result<(), RecomputeError> {
        match self.unmatched().iter().position(|unmatched| *unmatched) {
            Some(at) => Err(self.unmatched_error(at)),
            None => Ok(()),
        }
    }

    /// Checks that each name and each pattern in the settings matches a region of the model. This call is collective:
    /// make it on all ranks of the pipeline group.
    ///
    /// # Errors
    ///
    /// [`RecomputeError::Unmatched`] if a name or a pattern matches no region. The error lists the regions of this
    /// rank.
    pub fn check_regions(&self, groups: &ParallelContext) -> Result<(), RecomputeError> {
        let flags = self.unmatched();
        if flags.is_empty() {
            return Ok(());
        }
        match first_on_all(flags.into_iter(), groups.pipeline())? {
            Some(at) => Err(self.unmatched_error(at)),
            None => Ok(()),
        }
    }

    /// Returns for each name, and then for each pattern, whether this rank has no matching region.
    fn unmatched(&self) -> Vec<bool> {
        let regions = self.0.regions.lock();
        let named = self.config().modules.iter();
        let named = named.map(|module| !regions.modules.contains(module));
        let globs = self.0.globs.iter();
        let globs = globs.map(|glob| !regions.paths.iter().any(|path| glob.matches(path)));
        named.chain(globs).collect()
    }

    fn unmatched_error(&self, at: usize) -> RecomputeError {
        let (config, regions) = (self.config(), self.0.regions.lock());
        match config.modules.get(at) {
            Some(module) => {
                let known = regions.modules.iter().map(|module| module.name());
                RecomputeError::unmatched(module.name(), known)
            }
            None => {
                let at = at - config.modules.len();
                let known = crate::glob::nearest(
                    &self.0.globs[at],
                    regions.paths.iter().map(String::as_str),
                );
                let given = format!("pattern {:?}", config.patterns[at]);
                RecomputeError::unmatched(&given, known.iter().map(String::as_str))
            }
        }
    }
}

/// A recomputation region: a part of a model that the backward pass recomputes if the settings select it. See
/// [`ModelBuilder::recompute_region`](crate::nn::ModelBuilder::recompute_region).
#[derive(Clone, Debug, Default)]
pub struct RecomputeRegion {
    /// `None` if the region is never recomputed.
    state: Option<(Recompute, DropoutPosition)>,
}

impl RecomputeRegion {
    /// Returns whether the region is recomputed in any micro-batch.
    pub(in crate::nn) fn is_on(&self) -> bool {
        self.state.is_some()
    }

    /// Returns whether the region is recomputed in the current micro-batch.
    pub fn is_active(&self) -> bool {
        let state = self.state.as_ref();
        state.is_some_and(|(recompute, _)| recompute.0.is_active.load(Ordering::Relaxed))
    }

    /// Returns `body(x)`. If the region is [active](Self::is_active), only `x` is kept for the backward pass, which
    /// runs `body` again with the same dropout masks. See [`recompute_at`](super::recompute_at).
    ///
    /// # Panics
    ///
    /// See [`recompute`](super::recompute).
    pub fn run<const D: usize, const E: usize>(
        &self,
        x: Tensor<D>,
        body: impl Fn(Tensor<D>) -> Tensor<E> + Send + Sync + 'static,
    ) -> Tensor<E> {
        let [y] = self.run_outputs(x, move |x| [body(x)]);
        y
    }

    /// Does the same as [`run`](Self::run) for a body with several outputs.
    pub(in crate::nn) fn run_outputs<const D: usize, const E: usize, const K: usize>(
        &self,
        x: Tensor<D>,
        body: impl Fn(Tensor<D>) -> [Tensor<E>; K] + Send + Sync + 'static,
    ) -> [Tensor<E>; K] {
        match &self.state {
            Some((recompute, position)) if self.is_active() => {
                recompute_in(recompute.0.store.as_ref(), position, x, body)
            }
            _ => body(x),
        }
    }

    /// Does the same as [`run`](Self::run) for layers whose input and output are residual streams. If the region is
    /// active, only the sum of the residual stream and its pending branch is kept. The gradients are bit-identical to
    /// the gradients of the same layers without a region.
    ///
    /// # Panics
    ///
    /// See [`recompute`](super::recompute).
    pub fn run_stream(
        &self,
        x: Residual,
        body: impl Fn(Residual) -> Residual + Send + Sync + 'static,
    ) -> Residual {
        if !self.is_active() || forward_context::anchor().is_none() {
            return body(x);
        }
        let (sum, added_bias) = x.into_parts();
        let bias_of_output = Arc::new(Mutex::new(None));
        let to = bias_of_output.clone();
        let y = self.run(sum, move |sum| {
            let (y, bias) = body(Residual::from_parts(sum, added_bias.clone())).into_parts();
            *to.lock() = bias;
            y
        });
        let bias = bias_of_output.lock().take();
        Residual::from_parts(y, bias)
    }
}
