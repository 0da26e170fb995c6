//! Data parallelism for any Burn module: parameters and gradients live in flat buffers, whole or
//! sharded over the ranks; gradients leave backward through the door, are summed over the
//! micro-batches and the ranks, and divided by the number of tokens.
//!
//! ```text
//! let mut ddp = DistributedDataParallel::new(model, &groups)?;
//! for batch in micro_batches {
//!     let loss = ddp.forward(&device, |model| model.loss(batch));   // summed over the tokens
//!     ddp.backward(loss);                                           // backward_last for the last
//! }
//! let gradients = ddp.reduce(tokens)?;                              // tokens of this rank
//! ```
//!
//! [`DataParallelConfig`] says what is sharded (ZeRO 1 to 3, hybrid), in which type the model
//! computes, and what overlaps. With `fp8_param_gather` the weights of 8-bit layers are gathered as such:
//! their buckets have one byte for an element, and what every rank keeps of them are the two copies that
//! layers multiply with ([`GradientSink::quantized`](crate::nn::door::GradientSink::quantized)); the
//! masters, in f32 and sharded, are what is stepped, saved and compared. After a step that is skipped too,
//! codes are made anew, with the scales that follow from it.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::choice::Chosen;
use crate::collective::start_all_gather;
use crate::comm::{Buffer, Groups};
use crate::nn::door::{DeferringSink, with_anchor};
use crate::nn::fp8::Fp8;
use crate::nn::{ParallelModule, ParameterTable, Position};

mod axes;
mod blocks;
mod buckets;
mod build;
mod config;
mod counted;
mod error;
mod gradients;
mod guard;
pub mod layout;
mod memory;
mod order;
mod outline;
mod parameters;
mod plan;
mod quantized;
mod reduction;
mod replicas;
mod store;
mod sums;
#[cfg(test)]
mod tests;
mod usage;
mod uses;

use build::NamedWeight;
pub use config::{DataParallelConfig, DataParallelConfigError, Moments, Precision};
pub(crate) use counted::{Chosen as ChosenElements, Stretch};
pub use error::DataParallelError;
pub use gradients::Gradients;
use gradients::ModelSums;
pub use guard::Culprit;
pub use memory::machine;
pub use memory::{MemoryError, MemoryPlan, MemoryRules, UnknownStage, ZeroStage};
pub use outline::Outline;
pub(crate) use plan::Plan;
use store::Store;
pub(crate) use usage::Flat;
pub use usage::{Category, Holding, Usage};

/// A module whose parameters and gradients are shared by the ranks of the data axis.
///
/// The module itself holds no parameters, only their shapes: its layers get them through their
/// doors, by [`Param::val`](burn::module::Param::val). [`to_module`](Self::to_module) gives a module
/// that holds them.
#[derive(Debug)]
pub struct DistributedDataParallel<M> {
    module: M,
    table: Arc<ParameterTable>,
    position: Position,
    groups: Groups,
    store: Arc<Store>,
    sums: ModelSums,
    counted: Vec<Stretch>,
    kernels: Chosen,
    fp8: Fp8,
}

impl<M: Module> DistributedDataParallel<M> {
    /// Wraps a module with the [default settings](DataParallelConfig): nothing is sharded.
    ///
    /// # Errors
    ///
    /// See [`with`](Self::with).
    pub fn new(model: ParallelModule<M>, groups: &Groups) -> Result<Self, DataParallelError> {
        Self::with(model, groups, &DataParallelConfig::default())
    }

    /// Wraps a module; every rank must come. Parameters are made equal to those of the first rank
    /// that holds them, so a module need not be built from one seed. Only the sections that
    /// neighbours on the tensor axis share must be equal already, as [`Scope`](crate::nn::Scope)
    /// builds them.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Config`] for settings that do not fit the ranks or the model,
    /// [`DataParallelError::OtherModel`] when the tables of the ranks differ.
    pub fn with(
        model: ParallelModule<M>,
        groups: &Groups,
        config: &DataParallelConfig,
    ) -> Result<Self, DataParallelError> {
        let weights = model.fp8.weights();
        Self::with_weights(model, groups, config, weights)
    }

    /// The same with the 8-bit weights of the model.
    fn with_weights(
        model: ParallelModule<M>,
        groups: &Groups,
        config: &DataParallelConfig,
        weights: Vec<NamedWeight>,
    ) -> Result<Self, DataParallelError> {
        let ParallelModule {
            module,
            table,
            position,
            kernels,
            fp8,
        } = model;
        check_same_table(&table, groups)?;
        check_ends(&table, groups)?;
        fp8.check_layers(groups)?;
        // A copy of every weight would stay where none is to stay.
        fp8.manage_weights(config.zero_stage != ZeroStage::Parameters);
        // Settings that do not fit are told as such, before what follows from them.
        config.check(groups.data().size())?;
        let quantizers = build::quantizers(&table, config, weights)?;
        build::check_quantizers(&quantizers, groups, config)?;
        let plan = build::plan(&module, &table, groups, config, quantizers)?;
        let store = Arc::new(Store::new(plan));
        let module = build::detach(module, &table, groups, &store)?;
        store.plan.reserve();
        store.finish_gathers();
        let first = groups.pipeline().rank() == 0;
        Ok(Self {
            sums: ModelSums::new(&store.plan, &table, groups)?,
            counted: counted::counted(&store.plan, &table, groups.place(), first),
            module,
            table: Arc::new(table),
            position,
            groups: groups.clone(),
            store,
            kernels,
            fp8,
        })
    }

    /// The module. Outside of [`forward`](Self::forward) it evaluates and records nothing.
    ///
    /// Its parameters are there by `Param::val` alone, and not for module visitors, which get them
    /// without doors; what it holds itself is not a number. See [`to_module`](Self::to_module).
    pub fn module(&self) -> &M {
        &self.module
    }

    /// How each parameter lies.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// Which operations are fused.
    pub fn kernels(&self) -> &Chosen {
        &self.kernels
    }

    /// The layers that multiply in 8 bits.
    pub fn fp8(&self) -> &Fp8 {
        &self.fp8
    }

    /// The ranks.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The settings.
    pub fn config(&self) -> &DataParallelConfig {
        &self.store.plan.config
    }

    /// Where parameters and gradients lie.
    pub fn layout(&self) -> &layout::BufferLayout {
        &self.store.plan.layout
    }

    /// Where the gradients go, for whoever runs the backward.
    pub fn sink(&self) -> Arc<dyn DeferringSink> {
        self.store.clone()
    }

    /// The position of the module's random streams.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// What this rank holds, as it is counted.
    pub fn usage(&self) -> &Usage {
        &self.store.plan.usage
    }

    /// What this rank will hold, as it is computed.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Memory`] for more bytes than can be counted.
    pub fn memory_plan(&self) -> Result<MemoryPlan, DataParallelError> {
        self.store.plan.memory()
    }

    /// Runs a forward whose parameters can be differentiated.
    ///
    /// `device` is where the inputs are; autodiff is turned on.
    pub fn forward<T>(&self, device: &Device, body: impl FnOnce(&M) -> T) -> T {
        self.store.begin(None);
        let device = device.clone().inner().autodiff();
        let anchor = Tensor::<1>::zeros([1], &device).require_grad();
        with_anchor(&anchor, || body(&self.module))
    }

    /// Adds the gradients of `loss`, which must be a sum over tokens, to those of this step.
    ///
    /// Returns Burn's gradients of other leaves, such as an input's.
    pub fn backward(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        let _span = tracing::debug_span!("backward").entered();
        let leaves = loss.backward();
        self.store.buckets.backward();
        leaves
    }

    /// The same for the last micro-batch of a step: no forward will follow, so each bucket is summed
    /// over the ranks as soon as its gradients are final, while the backward goes on.
    pub fn backward_last(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        self.store.buckets.close(None);
        self.backward(loss)
    }

    /// Ends the step: sums the gradients over the ranks and divides them by all tokens.
    ///
    /// `tokens` is the number of tokens in the micro-batches of *this* rank, so that ranks with
    /// more tokens weigh more. Every rank must come; one that has no tokens this time, and so ran
    /// no micro-batch at all, comes with 0 and gives nothing to the sums. A parameter that took no
    /// part in the loss has a gradient of zeros, and is named in a warning once.
    ///
    /// A step that fails is over: its gradients are forgotten, and those that still come are not
    /// waited for.
    ///
    /// # Errors
    ///
    /// [`DataParallelError`] when a backward is missing, or a rank.
    pub fn reduce(&mut self, tokens: u64) -> Result<Gradients, DataParallelError> {
        let _span = tracing::debug_span!("reduce_gradients").entered();
        let blocks = self.store.parameters.end();
        let mut summed = self.store.buckets.finish()?;
        let tokens = self.agree(tokens, [blocks, summed.print])?;
        self.sums.apply(&mut summed.shards);
        Ok(Gradients::new(summed.shards, tokens, summed.culprits))
    }

    /// The tokens of all ranks; from ZeRO-2 on, all must have done the same for them.
    fn agree(&self, tokens: u64, done: [u64; 2]) -> Result<u64, DataParallelError> {
        let data = self.groups.data();
        let own = [tokens, done[0], done[1]].map(|x| x as i64);
        let all = i64s(data.all_gather(Buffer::from(own.to_vec()))?);
        let stage = self.config().zero_stage;
        let differs = |other: &[i64]| stage >= ZeroStage::Gradients && other[1..] != own[1..];
        if let Some(other) = all.chunks(3).position(differs) {
            return Err(DataParallelError::OtherOrder {
                rank: self.groups.rank(),
                other: data.group().ranks()[other],
                stage,
            });
        }
        Ok(all.chunks(3).map(|rank| rank[0] as u64).sum())
    }

    /// Gradients from this rank's part of each parameter's, `[elements]` in the order of the table,
    /// as sums over `tokens`: for gradients that were not made by [`backward`](Self::backward).
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Elements`] where one does not fit its parameter.
    pub fn gradients_of(
        &self,
        parts: Vec<Tensor<1>>,
        tokens: u64,
    ) -> Result<Gradients, DataParallelError> {
        replicas::gradients_of(&self.store.plan, parts, tokens)
    }

    /// This rank's part of each parameter's gradient, whole over the data axis: `[elements]` in the
    /// order of the table. Every rank of the data axis must come.
    pub fn whole_gradients(&self, gradients: &Gradients) -> Vec<Tensor<1>> {
        let plan = &self.store.plan;
        let sums = gradients.sums().enumerate();
        let flats: Vec<_> = sums
            .map(|(number, sum)| self.gather(number, sum.clone()))
            .collect();
        let part = |index| {
            let (number, range) = plan.place(index);
            let sum: Tensor<1> = flats[number].clone().slice([range]);
            sum.mul_scalar(gradients.factor())
        };
        (0..plan.parameters.len()).map(part).collect()
    }

    /// This rank's part of each parameter, in the type that it is stepped in: `[elements]` in the
    /// order of the table. Every rank of the data axis must come.
    pub fn parameters(&self) -> Vec<Tensor<1>> {
        let plan = &self.store.plan;
        let whole = |number| self.gather(number, self.store.parameters.kept(number));
        let flats: Vec<_> = (0..plan.buckets()).map(whole).collect();
        let part = |index| {
            let (number, range) = plan.place(index);
            flats[number].clone().slice([range])
        };
        (0..plan.parameters.len()).map(part).collect()
    }

    /// A bucket from what the ranks that share it have.
    fn gather(&self, number: usize, part: Tensor<1>) -> Tensor<1> {
        let shard = &self.store.plan.axes.shard;
        match (shard.size(), self.store.plan.elements(number)) {
            (1, _) | (_, 0) => part,
            _ => start_all_gather(part, 0, shard).wait(),
        }
    }

    /// A module that holds its parameters, in the type that they are stepped in, and has no doors.
    /// Every rank of the data axis must come.
    pub fn to_module(&self) -> M {
        let mut values = build::Fill(self.parameters().into_iter());
        self.module.clone().map(&mut values)
    }

    /// Replaces the parameters by what `change` makes of them. Every rank of the data axis must
    /// come, and change them alike; with `fp8_param_gather` those of the tensor axis too, as weights
    /// are quantised anew, with the scales that their layers have then.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        let module = change(self.to_module());
        let mut load = build::Load {
            store: &self.store,
            next: 0,
        };
        module.visit(&mut load);
        self.fp8.weights_changed();
        self.store.finish_gathers();
    }

    /// Checks that ranks which hold the same part of a parameter hold the same bits: replicas on the
    /// data axis, and on the tensor axis. Every rank of the stage must come.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Drifted`] names a parameter that is not, and two ranks.
    pub fn check_replicas(&self) -> Result<(), DataParallelError> {
        replicas::check(&self.store, &self.table, &self.groups)
    }

    /// What this rank steps of a bucket, in the type that it is stepped in.
    pub(crate) fn kept(&self, bucket: usize) -> Tensor<1> {
        self.store.parameters.kept(bucket)
    }

    /// Replaces it, as a step does; [`stepped`](Self::stepped) must follow. `model` is its copy in the
    /// type of the model where that is another one.
    pub(crate) fn replace(&mut self, bucket: usize, value: Tensor<1>, model: Option<Tensor<1>>) {
        let Flat { held, .. } = self.take(bucket);
        self.put(bucket, Flat::holding(value, held), model);
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.store.plan
    }

    /// What this rank counts of the gradients.
    pub(crate) fn counted(&self) -> &[Stretch] {
        &self.counted
    }

    /// What this rank steps of a bucket, taken away to be stepped.
    pub(crate) fn take(&mut self, bucket: usize) -> Flat {
        self.store.parameters.take(bucket)
    }

    /// Gives it back, with its copy in the type of the model where that is another one.
    pub(crate) fn put(&mut self, bucket: usize, master: Flat, model: Option<Tensor<1>>) {
        self.store.parameters.put(bucket, master, model);
    }

    /// No rank has stepped. Weights that are kept in 8 bits are made anew all the same, as their scales
    /// may be others: so they follow from masters and scales alone, as after a checkpoint.
    pub(crate) fn skipped(&mut self) {
        if self.config().fp8_param_gather {
            self.stepped();
        }
    }

    /// The optimizer has stepped all buckets, and let their gradients go.
    pub(crate) fn stepped(&mut self) {
        self.fp8.weights_changed();
        self.store.finish_gathers();
    }
}

fn i64s(buffer: Buffer) -> Vec<i64> {
    match buffer {
        Buffer::I64(values) => values,
        other => unreachable!("i64 went in, {} came out", other.dtype()),
    }
}

fn check_same_table(table: &ParameterTable, groups: &Groups) -> Result<(), DataParallelError> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    for entry in table.entries() {
        (&entry.path, &entry.shape, format!("{:?}", entry.placement)).hash(&mut hasher);
    }
    let own = hasher.finish() as i64;
    let all = i64s(groups.stage().all_gather(Buffer::from(vec![own]))?);
    match all.iter().position(|other| *other != own) {
        Some(other) => Err(DataParallelError::OtherModel {
            rank: groups.rank(),
            other: groups.stage().group().ranks()[other],
        }),
        None => Ok(()),
    }
}

fn check_ends(table: &ParameterTable, groups: &Groups) -> Result<(), DataParallelError> {
    let (rank, ranks) = (groups.pipeline().rank(), groups.pipeline().size());
    let shared = table.entries().iter().find(|entry| entry.at_both_ends);
    match shared {
        Some(entry) if rank != 0 && rank + 1 != ranks => Err(DataParallelError::NotAtTheEnds {
            path: entry.path.clone(),
            rank,
            ranks,
        }),
        _ => Ok(()),
    }
}
