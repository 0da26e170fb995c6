//! Builds the modules on one rank of a pipeline.

use burn::module::{
    Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;
use burn_megatron_kernels::record;

use crate::nn::{
    BuildError, LayerRun, ModelBuilder, ParallelModule, Recompute, RecomputeGranularity,
    RecomputeRegion,
};
use crate::pipeline::split::StageLayout;

/// Builds the modules of the pipeline stages on one rank. A model without a pipeline has one stage with all
/// modules.
///
/// [`first`](Self::first) returns the builder of a module in the first stage of the model, and [`last`](Self::last)
/// returns the builder of a module in the last stage. Both return `None` if the rank does not have the stage.
/// [`layers`](Self::layers) builds the layers in between.
#[derive(Clone, Debug)]
pub struct StageBuilder {
    root: ModelBuilder,
    stages: Vec<(usize, StageLayout)>,
}

impl StageBuilder {
    /// Creates a builder for the given stages. Each stage is given by its number and its layout.
    pub fn new(root: ModelBuilder, stages: &[(usize, StageLayout)]) -> Self {
        Self {
            root,
            stages: stages.to_vec(),
        }
    }

    /// Returns the builder of the modules that every rank has.
    pub fn root(&self) -> &ModelBuilder {
        &self.root
    }

    /// Returns the builder of module `name` at the start of the model, or `None` on ranks without the first
    /// stage.
    pub fn first(&self, name: &str) -> Option<ModelBuilder> {
        let stage = self.stage(|stage| stage.embedding)?;
        Some(self.root.child(name).in_stage(stage))
    }

    /// Returns the builder of module `name` at the end of the model, or `None` on ranks without the last stage.
    pub fn last(&self, name: &str) -> Option<ModelBuilder> {
        let stage = self.stage(|stage| stage.loss)?;
        Some(self.root.child(name).in_stage(stage))
    }

    /// Returns the builder of module `name` that both the first and the last stage use, such as an embedding that is
    /// tied to the output layer. Returns `None` on ranks that have neither stage. If the two stages are on different
    /// ranks, each of these ranks has a copy of the module, and the gradients of the copies are
    /// [summed](crate::nn::ParameterEntry::pipeline_copies).
    pub fn first_and_last(&self, name: &str) -> Option<ModelBuilder> {
        match (self.first(name), self.last(name)) {
            (Some(builder), Some(_)) => Some(builder),
            (builder, other) => {
                let ranks = self.root.groups().pipeline().size();
                let builder = builder.or(other)?;
                Some(builder.with_pipeline_copies([0, ranks - 1]))
            }
        }
    }

    /// Builds the layers of this rank. `new` is called with the number of the layer in the complete model and the
    /// builder of the module `name.NUMBER`. This method is for a model that calls its layers [one by
    /// one](StageLayers::of_stage). The recomputation settings cannot recompute the layers of such a model.
    ///
    /// # Errors
    ///
    /// Returns the first error of `new`, or [`BuildError::Config`] if the settings recompute complete layers.
    pub fn layers<T>(
        &self,
        name: &str,
        new: impl FnMut(usize, ModelBuilder) -> Result<T, BuildError>,
    ) -> Result<StageLayers<T>, BuildError> {
        if self.root.recompute().config().granularity == RecomputeGranularity::Full {
            return Err(self.root.child(name).error(
                "this model calls its layers one by one and cannot recompute whole ones: expected granularity = \
                 \"none\" or \"selective\"",
            ));
        }
        self.layers_with(name, new, &Recompute::default())
    }

    /// Builds the layers of this rank for a model that calls them in [runs](StageLayers::runs). A run is a group of
    /// consecutive layers. The recomputation settings determine the runs.
    ///
    /// # Errors
    ///
    /// Returns the first error of `new`.
    pub fn layers_in_runs<T>(
        &self,
        name: &str,
        new: impl FnMut(usize, ModelBuilder) -> Result<T, BuildError>,
    ) -> Result<StageLayers<T>, BuildError> {
        self.layers_with(name, new, &self.root.recompute())
    }

    fn layers_with<T>(
        &self,
        name: &str,
        mut new: impl FnMut(usize, ModelBuilder) -> Result<T, BuildError>,
        recompute: &Recompute,
    ) -> Result<StageLayers<T>, BuildError> {
        let list = self.root.child(name);
        let (mut layers, mut stages) = (vec![], vec![]);
        for (stage, layout) in &self.stages {
            let start = layers.len();
            let paths = layout.layers.clone();
            let paths: Vec<_> = paths
                .map(|number| list.child(number).path().into())
                .collect();
            let runs = recompute.layer_runs(*stage, &paths);
            for number in layout.layers.clone() {
                let layer = new(number, list.child(number).in_stage(*stage))?;
                layers.push((number, layer));
            }
            let runs = runs.into_iter().map(|run| LayerRun {
                layers: run.layers.start + start..run.layers.end + start,
                ..run
            });
            stages.push((*stage, runs.collect()));
        }
        Ok(StageLayers {
            layers,
            stages,
            region: recompute.region_if(true, self.root.position()),
        })
    }

    /// Finishes the model. See [`ModelBuilder::finish`].
    ///
    /// # Errors
    ///
    /// See [`ModelBuilder::finish`].
    pub fn finish<M: Module>(self, module: M) -> Result<ParallelModule<M>, BuildError> {
        self.root.finish(module)
    }

    fn stage(&self, has: impl Fn(&StageLayout) -> bool) -> Option<usize> {
        let mut stages = self.stages.iter();
        stages
            .find(|(_, stage)| has(stage))
            .map(|(stage, _)| *stage)
    }
}

/// Returns the module, which only the ranks of the first stage or only the ranks of the last stage have.
///
/// # Panics
///
/// Panics if this rank does not have the module. The caller has then passed a wrong stage.
pub fn on_stage<'a, T>(module: &'a Option<T>, name: &str) -> &'a T {
    match module {
        Some(module) => module,
        None => panic!("{name} is not on this rank of the pipeline"),
    }
}

/// The layers of the pipeline stages on one rank. [`StageBuilder::layers`] and [`StageBuilder::layers_in_runs`] build
/// them.
///
/// This type is a Burn module: a list of layers. The name of a layer is its number in the complete model. Therefore a
/// parameter has the same path on every rank and in every layout.
#[derive(Clone, Debug)]
pub struct StageLayers<T> {
    /// The layers with their numbers in the complete model.
    layers: Vec<(usize, T)>,
    /// The number of each stage with its runs, as index ranges of `layers`.
    stages: Vec<(usize, Vec<LayerRun>)>,
    /// The recomputation region of the recomputed layers.
    region: RecomputeRegion,
}

/// A run: consecutive layers of a stage that are recomputed together or not at all.
#[derive(Clone, Debug)]
pub struct StageRun<'a, T> {
    /// The layers with their numbers in the complete model.
    layers: &'a [(usize, T)],
    /// The index of the first layer on this rank.
    first: usize,
    /// The recomputation region of the run. In the micro-batches in which it is [active](RecomputeRegion::is_active),
    /// the layers are recomputed together.
    pub region: RecomputeRegion,
}

impl<T> StageRun<'_, T> {
    /// Returns the layers of the run in order. Each layer is returned with its index on this rank.
    pub fn layers(&self) -> impl Iterator<Item = (usize, &T)> {
        (self.first..)
            .zip(self.layers)
            .map(|(index, (number, layer))| {
                record::note(LayerNote(*number));
                (index, layer)
            })
    }
}

impl<T: Clone> StageRun<'_, T> {
    /// Returns clones of the layers. The body of a recomputed [region](Self::region) owns these clones.
    pub fn to_owned_layers(&self) -> Vec<(usize, T)> {
        let layers = (self.first..).zip(self.layers);
        layers
            .map(|(index, (_, layer))| (index, layer.clone()))
            .collect()
    }
}

impl<T> StageLayers<T> {
    /// Returns the layers of a stage in order. Each layer is returned with its index on this rank.
    ///
    /// # Panics
    ///
    /// Panics if the stage is not on this rank.
    pub fn of_stage(&self, stage: usize) -> impl Iterator<Item = (usize, &T)> {
        let runs = self.runs_of(stage).iter();
        let indices = runs.flat_map(|run| run.layers.clone());
        indices.map(|index| {
            let (number, layer) = &self.layers[index];
            record::note(LayerNote(*number));
            (index, layer)
        })
    }

    /// Returns the layers of a stage in order, divided into runs of consecutive layers. The [recomputation
    /// settings](crate::nn::RecomputeConfig) determine the runs if the layers were built with
    /// [`StageBuilder::layers_in_runs`].
    ///
    /// ```
    /// use burn::nn::Linear;
    /// use burn::tensor::Tensor;
    /// use burn_megatron::model::StageLayers;
    ///
    /// fn forward(layers: &StageLayers<Linear>, stage: usize, mut x: Tensor<3>) -> Tensor<3> {
    ///     for run in layers.runs(stage) {
    ///         let layers = run.to_owned_layers();
    ///         x = run.region.run(x, move |x| {
    ///             layers.iter().fold(x, |x, (_, layer)| layer.forward(x))
    ///         });
    ///     }
    ///     x
    /// }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the stage is not on this rank.
    pub fn runs(&self, stage: usize) -> impl Iterator<Item = StageRun<'_, T>> {
        self.runs_of(stage).iter().map(|run| {
            let layers = &self.layers[run.layers.clone()];
            // Layers that are recomputed together are planned as one.
            if let Some((number, _)) = layers.first() {
                record::note(LayerNote(*number));
            }
            StageRun {
                layers,
                first: run.layers.start,
                region: if run.is_recomputed {
                    self.region.clone()
                } else {
                    RecomputeRegion::default()
                },
            }
        })
    }

    fn runs_of(&self, stage: usize) -> &[LayerRun] {
        let Some((_, runs)) = self.stages.iter().find(|(own, _)| *own == stage) else {
            panic!("stage {stage} is not on this rank of the pipeline")
        };
        runs
    }

    /// Whether this is the last stage on this rank. If this rank has the [last stage of the model](StageBuilder::last),
    /// it is also the last stage of the model.
    pub fn is_last(&self, stage: usize) -> bool {
        self.stages.iter().all(|(own, _)| *own <= stage)
    }

    /// Returns all layers on this rank, ordered by index.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.layers.iter().map(|(_, layer)| layer)
    }

    /// Returns the number of layers on this rank.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether this rank has no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    fn map_layers(self, mut change: impl FnMut(usize, T) -> T) -> Self {
        let layers = self.layers.into_iter();
        let layers = layers.map(|(number, layer)| (number, change(number, layer)));
        Self {
            layers: layers.collect(),
            stages: self.stages,
            region: self.region,
        }
    }
}

/// A note in a [recording](record) that marks the beginning of a layer. It contains the number of the layer in the
/// complete model.
#[derive(Clone, Copy, Debug)]
pub struct LayerNote(pub usize);

/// The container type that is passed to module visitors, the same as for Burn's lists.
const CONTAINER: &str = "Vec";

impl<T: Module> Module for StageLayers<T> {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for (number, layer) in &self.layers {
            let name = number.to_string();
            visitor.enter_module(&name, CONTAINER);
            layer.visit(visitor);
            visitor.exit_module(&name, CONTAINER);
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.map_layers(|number, layer| {
            let name = number.to_string();
            mapper.enter_module(&name, CONTAINER);
            let layer = layer.map(mapper);
            mapper.exit_module(&name, CONTAINER);
            layer
        })
    }

    fn num_params(&self) -> usize {
        self.layers
            .iter()
            .map(|(_, layer)| layer.num_params())
            .sum()
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_layers(|_, layer| layer.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.map_layers(|_, layer| layer.fork(device))
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        let layers = self.layers.iter();
        layers.fold(devices, |devices, (_, layer)| {
            layer.collect_devices(devices)
        })
    }

    fn valid(&self) -> Self {
        self.clone().map_layers(|_, layer| layer.valid())
    }

    fn train(self) -> Self {
        self.map_layers(|_, layer| layer.train())
    }

    fn materialize(self) -> Self {
        self.map_layers(|_, layer| layer.materialize())
    }
}

impl<T: ModuleDisplay> ModuleDisplayDefault for StageLayers<T> {
    fn content(&self, content: Content) -> Option<Content> {
        let layers = self.layers.iter();
        layers
            .fold(content, |content, (number, layer)| {
                content.add(&number.to_string(), layer)
            })
            .set_top_level_type(&format!("StageLayers<{}>", self.len()))
            .optional()
    }
}

impl<T: ModuleDisplay> ModuleDisplay for StageLayers<T> {}
