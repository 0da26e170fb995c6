//! The computation, the exchanges and the saved tensors of the layers of a rank, for one micro-batch.

use burn_megatron::collective::ExchangeKind;
use burn_megatron::mesh::{Axis, AxisSet, Grid};

/// Bytes of an element of activations in a profile in 16 bits, which
/// [`ModelProfile::with_element_bytes`](crate::ModelProfile::with_element_bytes) scales to other types.
pub const ELEMENT: u64 = 2;

/// A tensor that is kept from the forward to the backward. Two operations that save one storage count it once.
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
    /// Its bytes.
    pub bytes: u64,
    /// Whether another operation keeps it on the device too, as the input of a pipeline stage is kept.
    pub is_shared: bool,
}

/// A product of matrices `[m, k]` and `[k, n]`, `batch` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The number of products, such as the experts of a rank.
    pub batch: u64,
    /// Rows of the result: tokens.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// The width that is summed over.
    pub k: u64,
}

impl Product {
    /// Floating-point operations, two per multiply-add.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// One call of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Pairs of a query and a key that it may attend to, summed over the samples; causal masks and windows are left
    /// out of it.
    pub pairs: u64,
    /// Heads of the queries on the rank.
    pub heads: u64,
    /// Width of a head of the queries and keys.
    pub query_width: u64,
    /// Width of a head of the values.
    pub value_width: u64,
}

impl AttentionShape {
    /// Floating-point operations of the forward: scores and weighted sums.
    pub fn flops(&self) -> f64 {
        2.0 * self.pairs as f64 * self.heads as f64 * (self.query_width + self.value_width) as f64
    }
}

/// In which pass of a training step something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrainingPass {
    /// The forward.
    Forward,
    /// The backward.
    Backward,
}

/// The ranks of a group that take part in an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupPart {
    /// All.
    #[default]
    Whole,
    /// The ranks on one node, of which there are this number.
    IntraNode(usize),
    /// The ranks with the same place on each node, which has this number of ranks.
    InterNode(usize),
}

/// A collective, or a message, of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The call.
    pub kind: ExchangeKind,
    /// The grid that the axes belong to.
    pub grid: Grid,
    /// Which ranks take part: those that differ in these axes.
    pub axes: AxisSet,
    /// Whether only some of them do.
    pub part: GroupPart,
    /// The number of ranks.
    pub ranks: u64,
    /// Bytes on this rank: of the larger of input and output, so the whole tensor of an all-gather or a
    /// reduce-scatter.
    pub bytes: u64,
    /// The pass.
    pub pass: TrainingPass,
}

/// One forward of one layer of a rank, for one micro-batch.
///
/// The embedding, and the output layer with its loss, are layers too.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerProfile {
    /// The tensors that the layer keeps for its backward, its input where an operation saves it included.
    pub saved: Vec<SavedTensor>,
    /// The products of its forward. The backward has two of the same size for each, the gradients of both operands.
    pub products: Vec<Product>,
    /// The attention of its forward.
    pub attention: Vec<AttentionShape>,
    /// Bytes that the operations of its forward read and write which are neither products nor attention.
    pub streamed_bytes: u64,
    /// The number of operations of its forward, exchanges not counted; 0 where it is not known.
    pub operations: u64,
    /// The exchanges of its forward and its backward.
    pub exchanges: Vec<Exchange>,
    /// Bytes of its output.
    pub output_bytes: u64,
    /// The most bytes that its backward allocates at once in addition to the saved tensors and the gradient of its output:
    /// temporaries, and the gradient of its input.
    pub backward_bytes: u64,
}

impl LayerProfile {
    /// Bytes that it keeps for its backward.
    pub fn saved_bytes(&self) -> u64 {
        self.saved.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Floating-point operations of its forward.
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

    /// Adds an exchange of the `ranks` ranks of an axis of the dense grid. A single rank exchanges nothing.
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

    /// Adds the computation, the exchanges and the saved tensors of a part that runs after this one, but not its output.
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
    /// On the first stage.
    pub embedding: Option<LayerProfile>,
    /// The distinct layers between, with the number of each.
    pub layers: Vec<(LayerProfile, usize)>,
    /// On the last stage: the output layer and the loss. The last norm counts with the last layer.
    pub output: Option<LayerProfile>,
    /// The most bytes that a forward has allocated at once, of those that it keeps and its temporaries.
    pub forward_bytes: u64,
    /// The most bytes of the backward of one micro-batch, of those that the forward kept, its temporaries and gradients of
    /// activations.
    pub backward_bytes: u64,
    /// The bytes that weight gradients hold until a schedule computes them in an action of their own.
    pub deferred_bytes: u64,
    /// The inputs of recomputed blocks that may be [on the host](burn_megatron::nn::ActivationOffload), in the order of the forward.
    pub offloadable: Vec<BlockInput>,
    /// The bytes that the stage receives for a micro-batch; 0 for the first.
    pub input_bytes: u64,
}

impl StageProfile {
    /// Returns the bytes that the stage sends for a micro-batch.
    pub fn output_bytes(&self) -> u64 {
        self.layers
            .last()
            .map_or(0, |(layer, _)| layer.output_bytes)
    }

    /// All layers, each with its number.
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

    /// Bytes that one micro-batch keeps for its backward in this stage.
    pub fn saved_bytes(&self) -> u64 {
        self.all()
            .map(|(layer, n)| layer.saved_bytes() * n as u64)
            .sum()
    }

    /// Floating-point operations of one forward.
    pub fn flops(&self) -> f64 {
        self.all().map(|(layer, n)| layer.flops() * n as f64).sum()
    }
}
