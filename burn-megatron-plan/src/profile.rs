//! The computation, the exchanges and the saved tensors of the layers of a rank, for one micro-batch.

use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, AxisSet, Grid};

/// Bytes of an activation element in a 16-bit profile.
/// [`ModelProfile::with_element_bytes`](crate::ModelProfile::with_element_bytes) scales a profile to other types.
pub const ELEMENT: u64 = 2;

/// A tensor that is kept from the forward to the backward. A storage that two operations save counts once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// The operation that saves it.
    pub name: String,
    /// The bytes of its storage.
    pub bytes: u64,
}

/// The saved input of a recomputed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInput {
    /// The size in bytes.
    pub bytes: u64,
    /// Whether another operation also keeps it on the device. An example is the input of a pipeline stage.
    pub is_shared: bool,
}

/// A batch of matrix products `[m, k]` x `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The number of products, for example the number of experts of a rank.
    pub batch: u64,
    /// Rows of the result, which are tokens.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// The width over which the product sums.
    pub k: u64,
}

impl Product {
    /// Returns the floating-point operations, two per multiply-add.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// One call of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Query-key pairs, summed over the samples. Pairs that a causal mask or a window removes are not counted.
    pub pairs: u64,
    /// Heads of the queries on the rank.
    pub heads: u64,
    /// Width of a query or key head.
    pub query_width: u64,
    /// Width of a value head.
    pub value_width: u64,
}

impl AttentionShape {
    /// Returns the floating-point operations of the forward: the scores and the weighted sums.
    pub fn flops(&self) -> f64 {
        2.0 * self.pairs as f64 * self.heads as f64 * (self.query_width + self.value_width) as f64
    }
}

/// A pass of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrainingPass {
    /// The forward.
    Forward,
    /// The backward.
    Backward,
}

/// The part of a group that takes part in an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupPart {
    /// All ranks of the group.
    #[default]
    Whole,
    /// The ranks on one node. The value is the number of ranks per node.
    IntraNode(usize),
    /// The ranks at the same position on each node. The value is the number of ranks per node.
    InterNode(usize),
}

/// A collective or a message of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The kind of exchange.
    pub kind: ExchangeKind,
    /// The grid that the axes belong to.
    pub grid: Grid,
    /// The axes in which the ranks that take part differ.
    pub axes: AxisSet,
    /// The part of the group that takes part.
    pub part: GroupPart,
    /// The number of ranks.
    pub ranks: u64,
    /// The larger of input and output on this rank, in bytes. For an all-gather or a reduce-scatter, this is the whole
    /// tensor.
    pub bytes: u64,
    /// The pass.
    pub pass: TrainingPass,
}

/// The forward and the backward of one layer of a rank, for one micro-batch.
///
/// The embedding is also a layer, and so is the output layer with its loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerProfile {
    /// The tensors that the layer keeps for its backward. The input of the layer is included if an operation saves it.
    pub saved: Vec<SavedTensor>,
    /// The matrix products of the forward. For each product, the backward has two products of the same size: the
    /// gradients of both operands.
    pub products: Vec<Product>,
    /// The attention calls of the forward.
    pub attention: Vec<AttentionShape>,
    /// Bytes that the other operations of the forward read and write: all operations except products and attention.
    pub streamed_bytes: u64,
    /// The number of operations of the forward, without exchanges. 0 if it is unknown.
    pub operations: u64,
    /// The exchanges of the forward and the backward.
    pub exchanges: Vec<Exchange>,
    /// Bytes of the output.
    pub output_bytes: u64,
    /// The peak number of bytes that the backward allocates for temporary tensors and the gradient of the input. The
    /// saved tensors and the gradient of the output are not included.
    pub backward_bytes: u64,
}

impl LayerProfile {
    /// Returns the bytes that the layer keeps for its backward.
    pub fn saved_bytes(&self) -> u64 {
        self.saved.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Returns the floating-point operations of the forward.
    pub fn flops(&self) -> f64 {
        let products: f64 = self.products.iter().map(Product::flops).sum();
        let attention: f64 = self.attention.iter().map(AttentionShape::flops).sum();
        products + attention
    }

    /// Adds a saved tensor with this number of elements.
    pub fn save(&mut self, name: &str, elements: u64) {
        self.saved.push(SavedTensor {
            name: name.into(),
            bytes: elements * ELEMENT,
        });
    }

    /// Adds a product of matrices `[m, k]` and `[k, n]`.
    pub fn multiply(&mut self, m: u64, n: u64, k: u64) {
        self.products.push(Product { batch: 1, m, n, k });
    }

    /// Adds an exchange between the `ranks` ranks of an axis of the dense grid. Adds nothing for a single rank.
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

    /// Adds the computation, the exchanges and the saved tensors of a part that runs after this part. Does not change
    /// [`output_bytes`](Self::output_bytes).
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

/// The layers of one pipeline stage on one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageProfile {
    /// The embedding, on the first stage.
    pub embedding: Option<LayerProfile>,
    /// The distinct layers, with the number of each.
    pub layers: Vec<(LayerProfile, usize)>,
    /// The output layer and the loss, on the last stage. The last norm counts as a part of the last layer.
    pub output: Option<LayerProfile>,
    /// The peak number of bytes of a forward: the tensors that it keeps and its temporary tensors.
    pub forward_bytes: u64,
    /// The peak number of bytes of the backward of one micro-batch: the tensors that the forward kept, the temporary
    /// tensors and the gradients of activations.
    pub backward_bytes: u64,
    /// The bytes that deferred weight gradients hold until the schedule computes them in a separate action.
    pub deferred_bytes: u64,
    /// The inputs of recomputed blocks that may be [offloaded to the host](burn_megatron::nn::ActivationOffload), in
    /// the order of the forward.
    pub offloadable: Vec<BlockInput>,
    /// The bytes that the stage receives for a micro-batch. 0 for the first stage.
    pub input_bytes: u64,
}

impl StageProfile {
    /// Returns the bytes that the stage sends for a micro-batch.
    pub fn output_bytes(&self) -> u64 {
        self.layers
            .last()
            .map_or(0, |(layer, _)| layer.output_bytes)
    }

    /// Returns all layers, each with its number of occurrences.
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

    /// Returns the bytes that one micro-batch keeps for its backward in this stage.
    pub fn saved_bytes(&self) -> u64 {
        self.all()
            .map(|(layer, n)| layer.saved_bytes() * n as u64)
            .sum()
    }

    /// Returns the floating-point operations of one forward.
    pub fn flops(&self) -> f64 {
        self.all().map(|(layer, n)| layer.flops() * n as f64).sum()
    }
}
