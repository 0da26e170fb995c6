//! The description of one attention call, whose sizes and options have been checked.

use burn::tensor::{DType, Tensor};

use super::options::{AttentionOptions, Heads, KeyRanges, MAX_POSITIONS};
use crate::KernelError;
use crate::cpu::wide;
use crate::flat::check_range;
use crate::gradient::{FlatGradients, Place};

/// The maximum width of a head. The kernels hold tiles of a head in registers and shared memory.
pub const MAX_WIDTH: usize = 256;

/// The alignment of gradients in a flat buffer, in elements. Four f32 elements have 16 bytes.
const SUMS_ALIGNMENT: usize = 4;

pub(super) const OPERATION: &str = "flash_attention";

/// The sizes, type and mask of one attention call. Only the functions of the attention module construct it, after they
/// have checked all inputs.
#[derive(Clone, Debug)]
pub struct AttentionProblem {
    /// The number of sequences.
    pub batch: usize,
    /// The number of queries per sequence.
    pub queries: usize,
    /// The number of keys per sequence.
    pub keys: usize,
    /// The number of query heads, the number of key-value groups, and the number of features per query head and key
    /// head.
    pub heads: Heads,
    /// The number of features per value head and per head of the output.
    pub value_width: usize,
    /// The element type of queries, keys and values.
    pub dtype: DType,
    /// The factor that multiplies the scores.
    pub scale: f64,
    /// The mask and the other options. `options.scale` equals `Some(scale)`.
    pub options: AttentionOptions,
    /// Whether each head has an attention sink.
    pub sink: bool,
    /// Whether queries, keys and values are in one joint projection.
    pub packed: bool,
    /// Whether the forward pass also returns the largest score of each query.
    pub with_max: bool,
}

/// The inputs of [`AttentionEngine::forward`](super::AttentionEngine::forward).
#[derive(Clone, Debug)]
pub struct AttentionInputs {
    /// Queries, keys and values.
    pub projections: Projections,
    /// The logit of each head's attention sink, `[heads]`, in the type of the log-sum-exp (f64 for f64, otherwise f32).
    pub sink: Option<Tensor<1>>,
}

/// The results of [`AttentionEngine::forward`](super::AttentionEngine::forward).
#[derive(Clone, Debug)]
pub struct AttentionOutputs {
    /// The output, `[batch, queries, heads, value width]`. It is 0 for a query without visible keys.
    pub out: Tensor<4>,
    /// The log-sum-exp of each query over its visible scores and the sink, `[batch, heads, queries]`. It is f64 for
    /// f64, otherwise f32. Without a sink, it is minus infinity for a query without visible keys.
    pub lse: Tensor<3>,
    /// The largest scaled and masked score of each query, without the sink, in the shape and the type of `lse`. For a
    /// query without visible keys, it is minus infinity or a finite number of at most -1e30.
    pub largest: Option<Tensor<3>>,
}

/// The inputs of [`AttentionEngine::backward`](super::AttentionEngine::backward).
#[derive(Debug)]
pub struct BackwardInputs {
    /// The inputs of the forward pass.
    pub inputs: AttentionInputs,
    /// Output and log-sum-exp of the forward pass. They may be computed from more keys than the keys in `inputs`,
    /// because probabilities are computed as `exp(score - lse)`.
    pub result: (Tensor<4>, Tensor<3>),
    /// The gradient of the output.
    pub dout: Tensor<4>,
    /// The places in a flat buffer to which the unrounded gradients of keys and values are written or added. This
    /// requires separate projections.
    pub sums: Option<FlatGradients>,
}

/// Queries, keys and values, as separate tensors or as a joint projection.
// The variants hold a few handles each, and only one value exists at a time.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Projections {
    /// Queries, keys and values in separate tensors.
    Separate {
        /// The queries, `[batch, queries, heads, width]`.
        q: Tensor<4>,
        /// The keys, `[batch, keys, groups, width]`.
        k: Tensor<4>,
        /// The values, `[batch, keys, groups, value width]`.
        v: Tensor<4>,
    },
    /// A joint projection, `[batch, seq, (heads + 2 groups) * width]`. Its features are all query heads, then the key
    /// heads, then the value heads.
    Packed(Tensor<3>),
}

/// The gradients of the inputs of an attention call.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// The gradients of queries, keys and values.
    pub projections: ProjectionGradients,
    /// The gradient of the sink, `[heads]`. `None` without a sink.
    pub dsink: Option<Tensor<1>>,
}

/// The gradients of [`Projections`], in separate tensors, in a flat buffer, or as a joint gradient.
// See `Projections`.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum ProjectionGradients {
    /// Gradients of queries, keys and values in separate tensors.
    Separate {
        /// The gradient of the queries, `[batch, queries, heads, width]`.
        dq: Tensor<4>,
        /// The gradient of the keys, `[batch, keys, groups, width]`.
        dk: Tensor<4>,
        /// The gradient of the values, `[batch, keys, groups, value width]`.
        dv: Tensor<4>,
    },
    /// The gradient of the queries, and the flat buffer with the gradients of keys and values.
    Flat {
        /// The gradient of the queries, `[batch, queries, heads, width]`.
        dq: Tensor<4>,
        /// The flat buffer, see [`BackwardInputs::sums`].
        flat: Tensor<1>,
    },
    /// The gradient of the joint projection.
    Packed(Tensor<3>),
}

impl AttentionProblem {
    pub(super) fn separate(
        [q, k, v]: [&Tensor<4>; 3],
        sink: Option<&Tensor<1>>,
        options: &AttentionOptions,
    ) -> Result<Self, KernelError> {
        let ([batch, queries, heads, width], [_, keys, groups, _]) = (q.dims(), k.dims());
        let value_width = v.dims()[3];
        let of_groups = |width| [batch, keys, groups, width];
        if k.dims() != of_groups(width) || v.dims() != of_groups(value_width) {
            return refuse(format!(
                "queries {:?}, keys {:?} and values {:?} do not agree: expected \
                     [batch, queries, heads, width], [batch, keys, groups, width] and \
                     [batch, keys, groups, value width]",
                q.dims(),
                k.dims(),
                v.dims()
            ));
        }
        for (other, name) in [(k.dtype(), "keys"), (v.dtype(), "values")] {
            if other != q.dtype() {
                let message = format!(
                    "queries are {:?}, {name} {other:?}: expected one type",
                    q.dtype()
                );
                return refuse(message);
            }
        }
        let heads = Heads {
            heads,
            groups,
            width,
        };
        let sizes = (batch, queries, keys);
        Self::new(sizes, heads, value_width, q.dtype(), sink, options, false)
    }

    pub(super) fn packed(
        qkv: &Tensor<3>,
        heads: Heads,
        sink: Option<&Tensor<1>>,
        options: &AttentionOptions,
    ) -> Result<Self, KernelError> {
        let [batch, seq, features] = qkv.dims();
        if features != heads.features() {
            return refuse(format!(
                "a joint projection {:?} does not hold {heads:?}, which takes {} features",
                qkv.dims(),
                heads.features()
            ));
        }
        let sizes = (batch, seq, seq);
        Self::new(sizes, heads, heads.width, qkv.dtype(), sink, options, true)
    }

    fn new(
        (batch, queries, keys): (usize, usize, usize),
        heads: Heads,
        value_width: usize,
        dtype: DType,
        sink: Option<&Tensor<1>>,
        options: &AttentionOptions,
        packed: bool,
    ) -> Result<Self, KernelError> {
        check_heads(heads)?;
        if queries.max(keys) > MAX_POSITIONS {
            let message =
                format!("{queries} queries and {keys} keys: expected at most 2^30 of each");
            return refuse(message);
        }
        if let Some(sink) = sink
            && sink.dims() != [heads.heads]
        {
            let (dims, heads) = (sink.dims(), heads.heads);
            let message = format!("a sink {dims:?} for {heads} heads: expected one logit per head");
            return refuse(message);
        }
        if let Some(ranges) = &options.ranges
            && (ranges.queries(), ranges.keys()) != (queries, keys)
        {
            let (rows, columns) = (ranges.queries(), ranges.keys());
            return refuse(format!(
                "ranges for {rows} queries and {columns} keys, but there are {queries} queries and {keys} keys: \
                 expected the same numbers"
            ));
        }
        let scale = options.scale.unwrap_or(1.0 / (heads.width as f64).sqrt());
        if !scale.is_finite() {
            let fits = "a finite number";
            return Err(KernelError::option(OPERATION, "scale", scale, fits));
        }
        if let Some(cap) = options.soft_cap
            && !(cap as f32 > 0.0 && (cap as f32).is_finite())
        {
            let fits = "a positive finite f32";
            return Err(KernelError::option(OPERATION, "soft_cap", cap, fits));
        }
        let mut options = options.clone();
        options.scale = Some(scale);
        Ok(Self {
            batch,
            queries,
            keys,
            heads,
            value_width,
            dtype,
            scale,
            options,
            sink: sink.is_some(),
            packed,
            with_max: false,
        })
    }

    /// Checks that the output, the log-sum-exp and the gradient of the output match this problem. Also checks that a
    /// flat buffer can hold the gradients of keys and values.
    pub(super) fn check_result(
        &self,
        (out, lse): &(Tensor<4>, Tensor<3>),
        dout: &Tensor<4>,
        sums: Option<&FlatGradients>,
    ) -> Result<(), KernelError> {
        let shape = self.out_shape();
        for (name, given) in [("output", out), ("gradient of the output", dout)] {
            if given.dims() != shape || given.dtype() != self.dtype {
                let message = format!(
                    "the {name} is {:?} in {:?}: expected {shape:?} in {:?}",
                    given.dims(),
                    given.dtype(),
                    self.dtype
                );
                return refuse(message);
            }
        }
        let (shape, wide) = (self.lse_shape(), wide(self.dtype));
        if lse.dims() != shape || lse.dtype() != wide {
            let message = format!(
                "the log-sum-exp is {:?} in {:?}: expected {shape:?} in {wide:?}",
                lse.dims(),
                lse.dtype()
            );
            return refuse(message);
        }
        sums.map_or(Ok(()), |sums| self.check_sums(sums))
    }

    fn check_sums(&self, sums: &FlatGradients) -> Result<(), KernelError> {
        let (flat, wide) = (&sums.flat, wide(self.dtype));
        let refused = |name, value, fits| KernelError::option(OPERATION, name, value, fits);
        if flat.dtype() != wide {
            let value = format!("{:?} with queries in {:?}", flat.dtype(), self.dtype);
            let fits = "F32, and F64 for F64";
            return Err(refused("type of the flat buffer", value, fits));
        }
        let is_aligned = |place: &Place| place.offset.is_multiple_of(SUMS_ALIGNMENT);
        if sums.places.len() != 2 || !sums.places.iter().all(is_aligned) {
            let fits = "one for keys and one for values, each at a multiple of 4 elements";
            return Err(refused("places", format!("{:?}", sums.places), fits));
        }
        for (place, shape) in sums.places.iter().zip([self.k_shape(), self.v_shape()]) {
            check_range(OPERATION, flat, place.offset, &shape)?;
        }
        Ok(())
    }

    /// Checks that the kernels support the widths of the heads.
    pub(super) fn check_widths(&self) -> Result<(), KernelError> {
        for (name, width) in [("heads", self.heads.width), ("values", self.value_width)] {
            if width == 0 || width > MAX_WIDTH {
                let message = format!("{name} of width {width}: expected 1 to {MAX_WIDTH}");
                return refuse(message);
            }
        }
        Ok(())
    }

    /// Returns the shape of the output, `[batch, queries, heads, value width]`.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads.heads, self.value_width]
    }

    /// Returns the shape of the queries, `[batch, queries, heads, width]`.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads.heads, self.heads.width]
    }

    /// Returns the shape of the keys, `[batch, keys, groups, width]`.
    pub fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.keys, self.heads.groups, self.heads.width]
    }

    /// Returns the shape of the values, `[batch, keys, groups, value width]`.
    pub fn v_shape(&self) -> [usize; 4] {
        [self.batch, self.keys, self.heads.groups, self.value_width]
    }

    /// Returns the shape of the log-sum-exp, `[batch, heads, queries]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.heads.heads, self.queries]
    }

    /// Returns whether no key is visible to any query.
    pub fn is_empty(&self) -> bool {
        let ranges = self.options.ranges.as_ref();
        self.batch * self.queries * self.keys == 0 || ranges.is_some_and(KeyRanges::is_empty)
    }
}

fn refuse<T>(message: String) -> Result<T, KernelError> {
    Err(KernelError::shape(OPERATION, message))
}

fn check_heads(heads: Heads) -> Result<(), KernelError> {
    if heads.groups == 0 || heads.heads == 0 || !heads.heads.is_multiple_of(heads.groups) {
        let (heads, groups) = (heads.heads, heads.groups);
        let message =
            format!("{heads} heads for {groups} groups: expected a multiple of the groups");
        return refuse(message);
    }
    Ok(())
}
