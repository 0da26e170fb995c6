//! Attention whose projections are recomputed in the backward pass. The output of attention and its softmax statistics
//! are kept (`mla_up_proj` of Megatron Core).

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::attention::{
    AttentionEngine, AttentionOptions, ProjectionGradients, attention_backward, attention_forward,
    flash_attention_with,
};
use burn_megatron_kernels::{MultiFunction, apply_multi, record};

use super::{RecomputeRegion, backward_of, input, input_gradient};
use crate::nn::forward_context;
use crate::nn::schedule_nodes::new_anchor;

impl RecomputeRegion {
    /// Returns the attention `[batch, queries, heads, value width]` of the queries, keys and values returned by
    /// `project`. If the region is [active](Self::is_active), the backward pass calls `project` again. Only `inputs`
    /// and the output with its softmax statistics are kept. At least one of `inputs` must be tracked.
    ///
    /// # Panics
    ///
    /// If `project` uses a tracked tensor other than its inputs. See also [`flash_attention_with`].
    pub(in crate::nn) fn attend(
        &self,
        inputs: [Tensor<3>; 2],
        project: impl Fn([Tensor<3>; 2]) -> [Tensor<4>; 3] + Send + Sync + 'static,
        engine: Arc<dyn AttentionEngine>,
        options: AttentionOptions,
    ) -> Tensor<4> {
        if !self.is_active() || forward_context::anchor().is_none() {
            let [q, k, v] = project(inputs);
            return flash_attention_with(engine, q, k, v, None, &options);
        }
        let attention = ProjectedAttention {
            project,
            autodiff: inputs[0].is_autodiff(),
            engine,
            options,
        };
        let [out] = apply_multi(inputs.map(Tensor::into_dispatch).to_vec(), attention);
        out
    }
}

/// Projections followed by attention, as one operation.
struct ProjectedAttention<F> {
    project: F,
    /// Whether the inputs have autodiff.
    autodiff: bool,
    engine: Arc<dyn AttentionEngine>,
    options: AttentionOptions,
}

impl<F> MultiFunction for ProjectedAttention<F>
where
    F: Fn([Tensor<3>; 2]) -> [Tensor<4>; 3] + Send + Sync + 'static,
{
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let latents = [0, 1].map(|i| input(inputs[i].clone(), self.autodiff));
        let projections = forward_context::recompute_first_pass(|| (self.project)(latents));
        let [q, k, v] = projections.map(|projection| {
            assert!(
                !(projection.is_autodiff() && projection.is_tracked()),
                "recomputed projections use a tracked tensor that is not their input, whose gradient would be lost"
            );
            projection.inner()
        });
        let (out, lse) = attention_forward(&*self.engine, q, k, v, None, &self.options);
        let out = out.into_dispatch();
        let saved = inputs.into_iter().chain([out.clone(), lse.into_dispatch()]);
        (vec![out], saved.collect())
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        mut gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let _span = tracing::trace_span!("recompute").entered();
        let Some(dout) = gradients.remove(0) else {
            return vec![None; needed.len()];
        };
        let latents: [Tensor<3>; 2] = [0, 1].map(|i| input(saved[i].clone(), self.autodiff));
        let result = (
            Tensor::from_dispatch(saved[2].clone()),
            Tensor::from_dispatch(saved[3].clone()),
        );
        let backward = |[q, k, v]: [Tensor<4>; 3]| {
            let dout = Tensor::from_dispatch(dout);
            let (engine, options) = (&*self.engine, &self.options);
            let all = attention_backward(engine, q, k, v, None, result, dout, options, None);
            match all.projections {
                ProjectionGradients::Separate { dq, dk, dv } => [dq, dk, dv],
                _ => unreachable!("gradients come in the form of the projections"),
            }
        };
        if record::is_recording() {
            record::second_pass(|| {
                let x = latents[0].clone();
                let project = || (self.project)(latents.clone());
                backward(forward_context::recompute_second_pass(&x, project));
            });
            let empty = |x: Tensor<3>| Some(x.empty_like().into_dispatch());
            return latents.map(empty).into();
        }
        let latents = latents.map(Tensor::require_grad);
        let anchor = new_anchor(&latents[0].device());
        let project = || (self.project)(latents.clone());
        let projections = forward_context::recompute_second_pass(&anchor, project);
        let gradients = backward(projections.clone().map(Tensor::inner));
        let gradients = gradients.map(|gradient| Some(gradient.into_dispatch()));
        let mut leaves = backward_of(projections.into_iter().zip(gradients), &anchor);
        let gradient = |x: Tensor<3>| Some(input_gradient(x, &mut leaves));
        latents.map(gradient).into()
    }
}

impl<F> fmt::Debug for ProjectedAttention<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attention to recomputed projections")
    }
}
