//! Profiles of the layers of a rank: the computation, the communication and the saved tensors for one micro-batch.

use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, AxisSet, Grid};

/// The size of an activation element in a 16-bit profile, in bytes.
/// [`ModelProfile::with_element_bytes`](crate::ModelProfile::with_element_bytes) converts a profile to other dtypes.
pub const ELEMENT: u64 = 2;

/// A tensor that is saved in the forward for the backward. If two operations save the same tensor, it is listed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// The name of the operation that saves the tensor.
    pub name: String,
    /// The size of the tensor's storage in bytes.
    pub bytes: u64,
}

/// The saved input of a block whose activations are recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInput {
    /// The size of the input in bytes.
    pub bytes: u64,
    /// Whether another operation also keeps the input on the device. An example is the input of a pipeline stage.
    pub is_shared: bool,
}

/// The sizes of a batched matrix multiplication `[batch, m, k]` x `[batch, k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The batch size, for example the number of experts of a rank.
    pub batch: u64,
    /// The number of rows of the result, which is the number of tokens.
    pub m: u64,
    /// The number of columns of the result.
    pub n: u64,
    /// The inner dimension, over which the multiplication sums.
    pub k: u64,
}

impl Product {
    /// Returns the FLOPs of the multiplication. A multiply-add counts as two.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// The sizes of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// The number of query-key pairs, summed over the samples. Pairs that a causal mask or a sliding window removes are
    /// not counted.
    pub pairs: u64,
    /// The number of query heads on the rank.
    pub heads: u64,
    /// The width of a query or key head.
    pub query_width: u64,
    /// The width of a value head.
    pub value_width: u64,
}

impl AttentionShape {
    /// Returns the FLOPs of the forward: the attention scores and the weighted sums of the values.
    pub fn flops(&self) -> f64 {
        2.0 * self.pairs as f64 * self.heads as f64 * (self.query_width + self.value_width) as f64
    }
}

/// The pass of a training step: forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrainingPass {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
}

/// The ranks of a group that take part in a collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupPart {
    /// All ranks of the group.
    #[default]
    Whole,
    /// The ranks of the group on one node. The value is the number of ranks per node.
    IntraNode(usize),
    /// The ranks of the group that have the same position on each node. The value is the number of ranks per node.
    InterNode(usize),
}

/// A collective or a message between ranks for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The kind of collective, or a message.
    pub kind: ExchangeKind,
    /// The grid that the axes belong to.
    pub grid: Grid,
    /// The axes of the process group: the ranks of the group differ only in these axes.
    pub axes: AxisSet,
    /// The ranks of the group that take part.
    pub part: GroupPart,
    /// The number of ranks that take part.
    pub ranks: u64,
    /// The size in bytes of the input or the output on this rank, whichever is larger. For an all-gather or a
    /// reduce-scatter, this is the size of the whole tensor.
    pub bytes: u64,
    /// The pass in which the collective or the message occurs.
    pub pass: TrainingPass,
}

/// The profile of one layer on a rank: the costs of its forward and its backward for one micro-batch.
///
/// A `LayerProfile` can also describe the embedding, or the output layer together with the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerProfile {
    /// The tensors that the layer keeps for its backward. They include the input of the layer if an operation saves it.
    pub saved: Vec<SavedTensor>,
    /// The matrix multiplications of the forward. For each of them, the backward has two multiplications with the same
    /// number of FLOPs, which compute the gradients of both operands.
    pub products: Vec<Product>,
    /// The attention calls of the forward.
    pub attention: Vec<AttentionShape>,
    /// The number of bytes that the memory-bound operations of the forward read and write. These are all operations
    /// except matrix multiplications and attention.
    pub streamed_bytes: u64,
    /// The number of operations of the forward, without communication. 0 if it is unknown.
    pub operations: u64,
    /// The collectives and messages of the forward and the backward.
    pub exchanges: Vec<Exchange>,
    /// The size of the output in bytes.
    pub output_bytes: u64,
    /// The peak number of bytes that the backward of the layer allocates for temporary tensors and the gradient of the
    /// input. The saved tensors and the gradient of the output are not included.
    pub backward_bytes: u64,
}

impl LayerProfile {
    /// Returns the number of bytes that the layer keeps for its backward.
    pub fn saved_bytes(&self) -> u64 {
        self.saved.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Returns the FLOPs of the forward: matrix multiplications and attention.
    pub fn flops(&self) -> f64 {
        let products: f64 = self.products.iter().map(Product::flops).sum();
        let attention: f64 = self.attention.iter().map(AttentionShape::flops).sum();
        products + attention
    }

    /// Adds a saved tensor with the given name and number of 16-bit elements.
    pub fn save(&mut self, name: &str, elements: u64) {
        self.saved.push(SavedTensor {
            name: name.into(),
            bytes: elements * ELEMENT,
        });
    }

    /// Adds a matrix multiplication of `[m, k]` and `[k, n]`.
    pub fn multiply(&mut self, m: u64, n: u64, k: u64) {
        self.products.push(Product { batch: 1, m, n, k });
    }

    /// Adds a collective over the `ranks` ranks of an axis of the dense grid. Adds nothing if `ranks` is 1.
    pub fn exchange(
        &mut self,
        kind: ExchangeKind,
        axis: Axis,
        ranks: u64,
        bytes: u64,
        pass: TrainingPass,
    ) {
        if ranks > 1 {
            self.exchanges.push(Exchange {
                kind,
                grid: Grid::Dense,
                axes: axis.into(),
                part: GroupPart::Whole,
                ranks,
                bytes,
                pass,
            });
        }
    }

    /// Adds the computation, the communication and the saved tensors of another part of the layer, which runs after
    /// this part. [`output_bytes`](Self::output_bytes) is not changed.
    pub fn add(&mut self, other: &Self) {
        self.saved.extend(other.saved.iter().cloned());
        self.products.extend(&other.products);
        self.attention.extend(&other.attention);
        self.exchanges.extend(&other.exchanges);
        self.streamed_bytes += other.streamed_bytes;
        self.operations += other.operations;
        self.backward_bytes = self.backward_bytes.max(other.backward_bytes);
    }
}

/// The profile of one pipeline stage on one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageProfile {
    /// The embedding, on the first stage.
    pub embedding: Option<LayerProfile>,
    /// The distinct layers, each with its number of occurrences.
    pub layers: Vec<(LayerProfile, usize)>,
    /// The output layer and the loss, which are on the last pipeline stage. The last norm is included in the last
    /// layer.
    pub output: Option<LayerProfile>,
    /// The peak number of bytes of the forward of one micro-batch: the tensors that it keeps and its temporary tensors.
    pub forward_bytes: u64,
    /// The peak number of bytes of the backward of one micro-batch: the tensors that the forward kept, the temporary
    /// tensors and the gradients of activations.
    pub backward_bytes: u64,
    /// The number of bytes that are kept for deferred weight gradients, until the schedule computes these gradients in
    /// a separate action.
    pub deferred_bytes: u64,
    /// The inputs of recomputed blocks that may be [offloaded to the host](burn_megatron::nn::ActivationOffload), in
    /// the order of the forward.
    pub offloadable: Vec<BlockInput>,
    /// The number of bytes that the stage receives for a micro-batch. 0 for the first stage.
    pub input_bytes: u64,
}

impl StageProfile {
    /// Returns the number of bytes that the stage sends for a micro-batch.
    pub fn output_bytes(&self) -> u64 {
        self.layers
            .last()
            .map_or(0, |(layer, _)| layer.output_bytes)
    }

    /// Returns all distinct layers of the stage, each with its number of occurrences.
    pub fn all(&self) -> impl Iterator<Item = (&LayerProfile, usize)> {
        let one = |layer: &Option<LayerProfile>| layer.is_some() as usize;
        let ends = [
            (&self.embedding, one(&self.embedding)),
            (&self.output, one(&self.output)),
        ];
        let ends = ends
            .into_iter()
            .filter_map(|(layer, n)| Some((layer.as_ref()?, n)));
        ends.chain(self.layers.iter().map(|(layer, n)| (layer, *n)))
    }

    /// Returns the number of bytes that one micro-batch keeps for its backward in this stage.
    pub fn saved_bytes(&self) -> u64 {
        self.all()
            .map(|(layer, n)| layer.saved_bytes() * n as u64)
            .sum()
    }

    /// Returns the FLOPs of the forward of one micro-batch: matrix multiplications and attention.
    pub fn flops(&self) -> f64 {
        self.all().map(|(layer, n)| layer.flops() * n as f64).sum()
    }
}
