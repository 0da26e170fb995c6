//! The modules of multi-token prediction (MTP).

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::model::StageBuilder;
use burn_megatron::nn::{
    ActivationLayout, BuildError, Dropout, Init, ModelBuilder, Norm, RecomputeRegion,
    ReplicatedLinear, ReplicatedLinearConfig, Residual, SummedLosses,
};

use crate::{Block, LayerSpec, Mixer, TransformerConfig};

/// An MTP module, whose block has the same specification as the last layer of the model.
#[derive(Module, Debug)]
pub(crate) struct MtpLayer<X: Mixer> {
    embedding_norm: Norm,
    hidden_norm: Norm,
    dropout: Dropout,
    projection: ReplicatedLinear,
    pub block: Block<X>,
    pub norm: Norm,
    #[module(skip)]
    region: RecomputeRegion,
}

impl<X: Mixer> MtpLayer<X> {
    /// Builds the MTP modules on the rank with the last pipeline stage. Returns an empty list on other ranks. `spec` is
    /// the specification of the last layer of the model. The blocks compute in FP8 if the last block of the model does.
    pub fn all(
        config: &TransformerConfig,
        spec: &LayerSpec<X::Spec>,
        stages: &StageBuilder,
        in_8_bits: bool,
    ) -> Result<Vec<Self>, BuildError> {
        let depths = config.mtp.as_ref().map_or(0, |mtp| mtp.layers);
        let Some(list) = stages.last("mtp").filter(|_| depths > 0) else {
            return Ok(vec![]);
        };
        (0..depths)
            .map(|depth| Self::new(config, spec, &list.child(depth), in_8_bits))
            .collect()
    }

    fn new(
        config: &TransformerConfig,
        spec: &LayerSpec<X::Spec>,
        scope: &ModelBuilder,
        in_8_bits: bool,
    ) -> Result<Self, BuildError> {
        let hidden = config.hidden;
        let scope = &match in_8_bits {
            true => scope.clone(),
            false => scope.without_fp8(),
        };
        let block = scope.child("block");
        Ok(Self {
            embedding_norm: config.norm().init(&scope.child("embedding_norm")),
            hidden_norm: config.norm().init(&scope.child("hidden_norm")),
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            projection: ReplicatedLinearConfig::new(2 * hidden, hidden)
                .with_init(Init::Normal(config.init_std))
                .init(&scope.child("projection"))?,
            region: block.recompute_layer_region(),
            block: Block::new(spec, &block)?,
            norm: config.norm().init(&scope.child("norm")),
        })
    }

    /// Computes the output of this MTP module from the output of the previous module and the embedding of the later
    /// tokens. All tensors have the layout of the residual stream. `run` runs the block.
    pub fn forward(
        &self,
        hidden: Tensor<3>,
        embedded: Tensor<3>,
        layout: ActivationLayout,
        run: impl FnOnce(&RecomputeRegion, &Block<X>, Residual) -> Residual,
    ) -> Tensor<3> {
        let embedded = self.dropout.forward(embedded, layout);
        let both = vec![
            self.embedding_norm.forward(embedded),
            self.hidden_norm.forward(hidden),
        ];
        let x = self.projection.forward(Tensor::cat(both, 2));
        let x = run(&self.region, &self.block, x.into());
        self.norm.forward_add(x).0
    }
}

/// The outputs and targets of the model, and the outputs and targets of all MTP modules.
pub(crate) struct MtpRows {
    pub own: (Tensor<3>, Tensor<2, Int>),
    pub further: (Tensor<3>, Tensor<2, Int>),
}

impl MtpRows {
    /// Splits the outputs and the targets along the batch dimension. The samples of the model come first, and the
    /// samples of the `depths` MTP modules follow.
    pub fn split(hidden: Tensor<3>, targets: Tensor<2, Int>, depths: usize) -> Self {
        let [rows, _] = targets.dims();
        let own = rows / (1 + depths);
        let part = |first, count| {
            let hidden = hidden.clone().narrow(0, first, count);
            (hidden, targets.clone().narrow(0, first, count))
        };
        Self {
            own: part(0, own),
            further: part(own, rows - own),
        }
    }
}

/// Adds the sum of the losses of all MTP modules, multiplied by `weight`, to the losses of the model.
pub(crate) fn add_sums(own: SummedLosses, further: Tensor<1>, weight: f64) -> SummedLosses {
    let further = further.mul_scalar(weight);
    let parts = match own.parts {
        Some(parts) => parts.inner(),
        None => own.objective.clone().inner(),
    };
    SummedLosses {
        objective: own.objective + further.clone(),
        parts: Some(Tensor::cat(vec![parts, further.inner()], 0)),
    }
}
