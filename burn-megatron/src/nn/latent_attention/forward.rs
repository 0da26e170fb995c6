//! The training form of latent attention, which computes the keys and values of each head.

use burn::tensor::Tensor;
use burn_megatron_kernels::rope::{self, Pairing, Positions, RopeOptions, RopeTable};

use super::MultiLatentAttention;
use crate::collective;
use crate::nn::context::SequenceShard;
use crate::nn::{AttentionContext, Norm, Residual, SEQUENCE_DIM};

/// The inputs of the projections of a layer's heads, on this rank.
#[derive(Clone, Debug)]
pub(super) struct Latents {
    /// The query latent `[batch, seq, q_rank]`, or the queries if the layer has no query latent.
    pub queries: Tensor<3>,
    /// The normalized key-value latent, and the shared key before its rotation: `[batch, seq, kv_rank + rope]`.
    pub keys: Tensor<3>,
}

impl MultiLatentAttention {
    /// Applies attention to `[batch, seq, hidden]` and returns the same shape. Under sequence parallelism the shape
    /// is `[batch, seq / tensor, hidden]`.
    ///
    /// # Panics
    ///
    /// With a KV cache, in these cases:
    ///
    /// - the tokens exceed the capacity of the cache;
    /// - the number of sequences differs from the number of sequences in the cache;
    /// - the tensors are on an autodiff device.
    pub fn forward(
        &self,
        x: Tensor<3>,
        rotary: &RopeTable,
        context: AttentionContext<'_>,
    ) -> Tensor<3> {
        let owned = self.region.is_active().then(|| context.to_owned_context());
        let Some(context) = owned.flatten() else {
            return self.output.product(self.attend(x, rotary, context));
        };
        let (layer, rotary) = (self.clone(), rotary.clone());
        let partial = self.region.run(x, move |x| {
            layer
                .output
                .partial(layer.attend(x, &rotary, context.context()))
        });
        self.output.reduced(partial)
    }

    /// Adds the pending branch of `x` to the residual stream, normalizes the sum with `norm`, and applies
    /// [`forward`](Self::forward) to the normalized values. Also returns the sum, which is the new residual stream. The
    /// output of the norm is kept for the backward pass.
    ///
    /// # Panics
    ///
    /// See [`forward`](Self::forward).
    pub fn forward_normalized(
        &self,
        norm: &Norm,
        x: Residual,
        rotary: &RopeTable,
        context: AttentionContext<'_>,
    ) -> (Tensor<3>, Tensor<3>) {
        let (normal, stream) = norm.forward_add(x);
        (self.forward(normal, rotary, context), stream)
    }

    /// Returns the output of this rank's heads, `[batch, seq, heads * value]`.
    fn attend(&self, x: Tensor<3>, rotary: &RopeTable, context: AttentionContext<'_>) -> Tensor<3> {
        let latents = self.latents(x);
        let context = match context {
            AttentionContext::Cached(layer) => return self.cached(latents, rotary, layer),
            context => context,
        };
        if self.projection_region.is_active()
            && let (Some(owned), Some(engine)) =
                (context.to_owned_context(), self.core.engine.clone())
        {
            let Latents { queries, keys } = latents;
            let batch = queries.dims()[0];
            let options = self.core.options_in(&context, &keys.device());
            let (layer, rotary) = (self.clone(), rotary.clone());
            let project = move |[queries, keys]: [Tensor<3>; 2]| {
                let (latents, context) = (Latents { queries, keys }, owned.context());
                let projections = layer.project(latents, &rotary, &context);
                layer.core.rows_of_kernel(projections, &context)
            };
            let out = self
                .projection_region
                .attend([queries, keys], project, engine, options);
            let [rows, tokens, heads, value] = out.dims();
            return out.reshape([batch, rows * tokens / batch, heads * value]);
        }
        let projections = self.project(latents, rotary, &context);
        self.core
            .attend_separate(projections, context, |weights, rows| {
                self.dropout.forward_rows(weights, rows, self.layout)
            })
    }

    /// Returns the latents of this rank's tokens.
    fn latents(&self, x: Tensor<3>) -> Latents {
        let sizes = self.sizes;
        let queries = self.query.as_ref().map(|query| query.forward(x.clone()));
        let down = self.down.forward(x);
        let part = |first, width| down.clone().narrow(2, first, width);
        let queries = match (&self.query_norm, queries) {
            (Some(norm), _) => norm.forward(part(0, sizes.q_rank)),
            (None, Some(queries)) => queries,
            (None, None) => unreachable!("queries have a latent or a projection of the input"),
        };
        let keys = self.kv_norm.forward(part(sizes.q_rank, sizes.kv_rank));
        let shared = part(sizes.q_rank + sizes.kv_rank, sizes.rope);
        Latents {
            queries,
            keys: Tensor::cat(vec![keys, shared], 2),
        }
    }

    /// Returns the queries of this rank's tokens, and the keys and values of all tokens of its sequences. Each is
    /// `[batch, seq, heads, ..]`.
    fn project(
        &self,
        latents: Latents,
        rotary: &RopeTable,
        context: &AttentionContext<'_>,
    ) -> [Tensor<4>; 3] {
        let sizes = self.sizes;
        let q = self.query_heads(latents.queries);
        let keys = self.entered(latents.keys);
        let [_, seq, ..] = q.dims();
        let positions = context.positions(rotary, seq, &q.device());
        if let AttentionContext::Sharded(shard) = context {
            let q = self.rotate(q, sizes.nope, rotary, &positions);
            let keys = self.gathered(self.rotated_latents(keys, rotary, &positions), shard);
            let [k, v] = self.expanded(keys);
            return [q, k, v];
        }
        let (kv, shared) = self.up(keys);
        let rotate = if self.fused_rope {
            rope::rotate_mla
        } else {
            rope::composed::rotate_mla
        };
        let pairing = Pairing::Interleaved;
        let (nope, value) = (sizes.nope, sizes.value);
        let (q, k, v) = rotate(q, kv, shared, nope, value, rotary, &positions, pairing);
        [q, k, v]
    }

    /// Returns the queries `[batch, seq, heads, nope + rope]` before their rotation.
    pub(super) fn query_heads(&self, queries: Tensor<3>) -> Tensor<4> {
        let q = match &self.query_up {
            Some(up) => up.forward(queries),
            None => queries,
        };
        let [batch, seq, _] = q.dims();
        q.reshape([
            batch,
            seq,
            self.sizes.heads,
            self.sizes.nope + self.sizes.rope,
        ])
    }

    /// Returns the latents of keys for the heads of each tensor rank. They cover the complete sequence, and their
    /// gradients are summed over the ranks.
    pub(super) fn entered(&self, keys: Tensor<3>) -> Tensor<3> {
        if self.sequence_parallel {
            collective::gather_sequence(keys, SEQUENCE_DIM, &self.tensor)
        } else {
            collective::copy(keys, &self.tensor)
        }
    }

    /// Gathers latents `[batch, seq / context, ..]` from all ranks that share the sequences, to `[batch, seq, ..]`.
    fn gathered(&self, keys: Tensor<3>, shard: &SequenceShard) -> Tensor<3> {
        let ([batch, local, width], [_, seq]) = (keys.dims(), shard.shape());
        let own = keys.reshape([batch * local, 1, width]);
        let all = shard.gathered(own, &self.context);
        all.reshape([batch, seq, width])
    }

    /// Rotates the shared key in latents `[batch, seq, kv_rank + rope]`.
    pub(super) fn rotated_latents(
        &self,
        keys: Tensor<3>,
        rotary: &RopeTable,
        positions: &Positions,
    ) -> Tensor<3> {
        let (keys, first) = (keys.unsqueeze_dim(2), self.sizes.kv_rank);
        self.rotate(keys, first, rotary, positions).squeeze_dim(2)
    }

    /// Returns the keys and values of this rank's heads, given rotated latents.
    pub(super) fn expanded(&self, keys: Tensor<3>) -> [Tensor<4>; 2] {
        let ([batch, seq, _], sizes) = (keys.dims(), self.sizes);
        let (kv, shared) = self.up(keys);
        let shared: Tensor<4> = shared.unsqueeze_dim(2);
        let shared: Tensor<4> = shared.expand([batch, seq, sizes.heads, sizes.rope]);
        let k = Tensor::cat(vec![kv.clone().narrow(3, 0, sizes.nope), shared], 3);
        [k, kv.narrow(3, sizes.nope, sizes.value)]
    }

    /// Returns the keys without a position and the values, `[batch, seq, heads, nope + value]`, and the shared key.
    fn up(&self, keys: Tensor<3>) -> (Tensor<4>, Tensor<3>) {
        let ([batch, seq, _], sizes) = (keys.dims(), self.sizes);
        let latent = keys.clone().narrow(2, 0, sizes.kv_rank);
        let kv = self.kv_up.forward_entered(latent);
        let kv = kv.reshape([batch, seq, sizes.heads, sizes.nope + sizes.value]);
        (kv, keys.narrow(2, sizes.kv_rank, sizes.rope))
    }

    /// Rotates the features from `first` on.
    pub(super) fn rotate(
        &self,
        x: Tensor<4>,
        first: usize,
        rotary: &RopeTable,
        positions: &Positions,
    ) -> Tensor<4> {
        let options = RopeOptions {
            pairing: Pairing::Interleaved,
            first,
            heads: None,
        };
        if self.fused_rope {
            rope::rotate(x, rotary, positions, &options)
        } else {
            rope::composed::rotate(x, rotary, positions, &options)
        }
    }
}
