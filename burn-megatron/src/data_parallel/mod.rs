//! Data parallelism for any Burn module: gradients leave backward through the door, are summed over
//! the micro-batches and the ranks, and divided by the number of tokens.
//!
//! ```text
//! let mut ddp = DistributedDataParallel::new(model, &groups)?;
//! for batch in micro_batches {
//!     let loss = ddp.forward(&device, |model| model.loss(batch));   // summed over the tokens
//!     ddp.backward(loss);
//! }
//! let gradients = ddp.reduce(tokens)?;                              // tokens of this rank
//! ```

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::{Device, Tensor};

use crate::choice::Chosen;
use crate::collective::{Comm, from_buffer, to_buffer};
use crate::comm::{Buffer, CommError, Groups, ReduceOp};
use crate::nn::door::{DeferringSink, Door, GradientSink, with_anchor};
use crate::nn::{ParallelModule, ParameterTable, Placement, Position};

mod gradients;
mod store;
mod sums;
#[cfg(test)]
mod tests;

pub use gradients::Gradients;
pub(crate) use gradients::owned;
use gradients::{SharedGroups, sum_together};
use store::{GradientStore, Slot};

/// A module whose gradients are summed over the data axis.
///
/// It holds the parameters as plain tensors: they never become leaves of an autodiff graph.
#[derive(Debug)]
pub struct DistributedDataParallel<M> {
    module: M,
    table: Arc<ParameterTable>,
    position: Position,
    groups: Groups,
    store: Arc<GradientStore>,
    shared: SharedGroups,
    kernels: Chosen,
}

/// What a data-parallel step can fail with.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DataParallelError {
    /// A parameter took no part in the loss.
    #[error("{path} received no gradient: the loss of this step does not depend on it")]
    Unused {
        /// The parameter.
        path: String,
    },
    /// A forward was not followed by its backward.
    #[error("{path} was used {uses} times in a forward whose backward did not run")]
    NoBackward {
        /// The parameter.
        path: String,
        /// How many uses are open.
        uses: usize,
    },
    /// A weight that two stages share lies where no sum reaches it.
    #[error(
        "{path} is shared by the first and the last stage, and lies on rank {rank} of a pipeline of \
         {ranks}: its gradients are summed between rank 0 and rank {}; a schedule that puts both \
         stages there, or on one rank, can train it, or an output that is not tied",
        ranks - 1
    )]
    NotAtTheEnds {
        /// The parameter.
        path: String,
        /// The rank of the pipeline axis that holds it.
        rank: usize,
        /// The ranks of the pipeline.
        ranks: usize,
    },
    /// The ranks of the data axis hold different models.
    #[error(
        "rank {rank} and rank {other} hold other parameters: the models were built differently"
    )]
    OtherModel {
        /// This rank.
        rank: usize,
        /// A rank that differs.
        other: usize,
    },
    /// The ranks could not communicate.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for DataParallelError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl<M: Module> DistributedDataParallel<M> {
    /// Wraps a module; every rank must come. Parameters are made equal to those of the first rank
    /// that holds them, so a module need not be built from one seed. Only the sections that
    /// neighbours on the tensor axis share must be equal already, as [`Scope`](crate::nn::Scope)
    /// builds them.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::OtherModel`] when the tables of the ranks differ.
    pub fn new(model: ParallelModule<M>, groups: &Groups) -> Result<Self, DataParallelError> {
        let ParallelModule {
            module,
            table,
            position,
            kernels,
        } = model;
        check_same_table(&table, groups)?;
        check_ends(&table, groups)?;
        let shared = SharedGroups::new(&table, groups)?;
        let ranks = table
            .entries()
            .iter()
            .map(|entry| entry.shape.len())
            .collect();
        let store = Arc::new(GradientStore::new(ranks, groups.data()));
        let table = Arc::new(table);
        let mut detach = Detach {
            table: &table,
            groups,
            next: 0,
            error: None,
        };
        let module = module.map(&mut detach);
        if let Some(error) = detach.error {
            return Err(error.into());
        }
        let sink: Arc<dyn GradientSink> = store.clone();
        let module = module.apply_reparameterization(Attach { sink, next: 0 });
        Ok(Self {
            module,
            table,
            position,
            groups: groups.clone(),
            store,
            shared,
            kernels,
        })
    }

    /// The module. Outside of [`forward`](Self::forward) it evaluates and records nothing.
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

    /// The ranks.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Where the gradients go, for whoever runs the backward.
    pub fn sink(&self) -> Arc<dyn DeferringSink> {
        self.store.clone()
    }

    /// The position of the module's random streams.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Runs a forward whose parameters can be differentiated.
    ///
    /// `device` is where the inputs are; autodiff is turned on.
    pub fn forward<T>(&self, device: &Device, body: impl FnOnce(&M) -> T) -> T {
        let device = device.clone().inner().autodiff();
        let anchor = Tensor::<1>::zeros([1], &device).require_grad();
        with_anchor(&anchor, || body(&self.module))
    }

    /// Adds the gradients of `loss`, which must be a sum over tokens, to those of this step.
    ///
    /// Returns Burn's gradients of other leaves, such as an input's.
    pub fn backward(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        let _span = tracing::debug_span!("backward").entered();
        loss.backward()
    }

    /// Ends the step: sums the gradients over the ranks and divides them by all tokens.
    ///
    /// `tokens` is the number of tokens in the micro-batches of *this* rank, so that ranks with
    /// more tokens weigh more. Every rank must come; one that has no tokens this time, and so ran
    /// no micro-batch at all, comes with 0 and gives nothing to the sums.
    ///
    /// A step that fails is over: its gradients are forgotten, and those that still come are not
    /// waited for.
    ///
    /// # Errors
    ///
    /// [`DataParallelError`] when a parameter received no gradient, or a rank is missing.
    pub fn reduce(&mut self, tokens: u64) -> Result<Gradients, DataParallelError> {
        let _span = tracing::debug_span!("reduce_gradients").entered();
        let mut nothing = Nothing::default();
        if tokens == 0 {
            self.module.visit(&mut nothing);
        }
        let mut nothing = nothing.0.into_iter();
        let (slots, sums) = self.store.take();
        let under_way: Vec<bool> = slots.iter().map(|slot| slot.under_way).collect();
        let received = slots.into_iter().zip(self.table.entries());
        let mut flat = received
            .map(|(slot, entry)| self.received(slot, nothing.next(), &entry.path))
            .collect::<Result<Vec<_>, _>>()?;
        for sums in sums {
            sums.finish(|index, sum| flat[index] = sum);
        }
        sum_together(&mut flat, |index| !under_way[index], self.groups.data());
        let tokens = sum(tokens, self.groups.data())?;
        Ok(Gradients::reduced(
            flat,
            tokens,
            &self.table,
            &self.groups,
            &self.shared,
        ))
    }

    /// The gradient of one parameter; some tensor where its sum is under way.
    fn received(
        &self,
        slot: Slot,
        nothing: Option<Tensor<1>>,
        path: &str,
    ) -> Result<Tensor<1>, DataParallelError> {
        let path = path.to_string();
        match (slot.expected, slot.sum.or(nothing)) {
            (0, Some(gradient)) => Ok(gradient),
            (0, None) if slot.under_way => Ok(Tensor::zeros([1], &Device::flex())),
            (0, None) => Err(DataParallelError::Unused { path }),
            (uses, _) => Err(DataParallelError::NoBackward { path, uses }),
        }
    }

    /// Replaces the module by what `change` makes of it; the doors stay.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        self.module = change(self.module.clone());
    }
}

/// The gradient of a loss over no tokens: a flat zero per parameter.
#[derive(Default)]
struct Nothing(Vec<Tensor<1>>);

impl ModuleVisitor for Nothing {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let len = value.shape().num_elements();
        let zeros = Tensor::zeros([len], (&value.device(), value.dtype()));
        self.0.push(zeros);
    }
}

fn sum(value: u64, comm: &Comm) -> Result<u64, CommError> {
    let sum = comm.all_reduce(Buffer::from(vec![value as i64]), ReduceOp::Sum)?;
    Ok(i64s(sum)[0] as u64)
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

/// Makes parameters plain, and equal on the ranks that hold the same.
struct Detach<'a> {
    table: &'a ParameterTable,
    groups: &'a Groups,
    next: usize,
    error: Option<CommError>,
}

impl ModuleMapper for Detach<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let entry = &self.table.entries()[self.next];
        self.next += 1;
        let holders = match entry.placement {
            Placement::Replicated => self.groups.stage(),
            Placement::Split { .. } => self.groups.data(),
        };
        param.map(|tensor| {
            let tensor = if tensor.is_autodiff() {
                tensor.inner()
            } else {
                tensor
            };
            if self.error.is_some() || holders.size() == 1 {
                return tensor;
            }
            let (shape, device, dtype) = (tensor.dims(), tensor.device(), tensor.dtype());
            match holders.broadcast(to_buffer(tensor.clone()), 0) {
                Ok(buffer) => from_buffer(buffer, shape, &device, dtype),
                Err(error) => {
                    self.error = Some(error);
                    tensor
                }
            }
        })
    }
}

/// Attaches the doors, in the order of the table.
struct Attach {
    sink: Arc<dyn GradientSink>,
    next: usize,
}

impl Reparameterizer for Attach {
    type Reparam = Door;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Door>) {
        let door = Door::new(self.next, self.sink.clone());
        self.next += 1;
        (param.set_require_grad(false), Some(door))
    }
}
