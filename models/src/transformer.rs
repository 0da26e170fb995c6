//! The decoder-only transformer.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::collective::{self, Comm};
use burn_megatron::comm::Groups;
use burn_megatron::nn::{
    BuildError, Dropout, Init, LearnedPositions, Lies, Norm, OutputLayer, ParallelModule,
    RotaryTable, SEQUENCE_DIM, Scope, VocabParallelCrossEntropy, VocabParallelEmbedding,
    Vocabulary,
};
use burn_megatron::train::LanguageModel;

use crate::{Block, Positions, TransformerConfig};

/// A GPT-2 or a Llama, depending on its config.
///
/// Its forward knows no ranks, but for the entry into the sequence-parallel region, where the
/// residual stream `[batch, seq, hidden]` becomes `[batch, seq / tensor, hidden]`.
#[derive(Module, Debug)]
pub struct Transformer {
    embedding: VocabParallelEmbedding,
    positions: Option<LearnedPositions>,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: Norm,
    output: OutputLayer,
    #[module(skip)]
    rotary: Option<RotaryTable>,
    #[module(skip)]
    loss: VocabParallelCrossEntropy,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    lies: Lies,
    #[module(skip)]
    config: TransformerConfig,
}

impl TransformerConfig {
    /// Builds this rank's part of the model, with its table of parameters.
    ///
    /// # Errors
    ///
    /// [`BuildError`] when the sizes do not fit each other or the mesh.
    pub fn init(
        &self,
        scope: Scope,
        sequence_parallel: bool,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        let model = Transformer::new(self, sequence_parallel, &scope)?;
        scope.finish(model)
    }
}

impl Transformer {
    fn new(
        config: &TransformerConfig,
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Result<Self, BuildError> {
        let head_width = config.check(scope.place().size, sequence_parallel)?;
        let (place, init) = (scope.place(), Init::Normal(config.init_std));
        let hidden = config.hidden;
        let vocabulary = Vocabulary::padded(
            config.vocabulary,
            config.vocabulary_divisible_by,
            place.size,
        );
        let (learned, rotary) = match config.positions {
            Positions::Learned => (true, None),
            Positions::Rotary { base } => (false, Some(base)),
        };
        let block = |i| {
            let scope = scope.child("blocks").child(i);
            Block::new(config, head_width, sequence_parallel, &scope)
        };
        let comm = scope.groups().tensor().clone();
        Ok(Self {
            embedding: VocabParallelEmbedding::new(
                vocabulary,
                hidden,
                init,
                sequence_parallel,
                &scope.child("embedding"),
            )?,
            positions: learned.then(|| {
                let scope = scope.child("positions");
                LearnedPositions::new(config.context, hidden, init, sequence_parallel, &scope)
            }),
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            blocks: (0..config.layers).map(block).collect::<Result<_, _>>()?,
            norm: Norm::new(
                config.norm,
                hidden,
                config.norm_epsilon,
                sequence_parallel,
                &scope.child("norm"),
            ),
            output: OutputLayer::new(
                vocabulary,
                hidden,
                init,
                config.tied,
                sequence_parallel,
                &scope.child("output"),
            )?,
            rotary: rotary.map(|base| {
                RotaryTable::new(
                    config.context,
                    head_width,
                    base,
                    scope.device(),
                    scope.dtype(),
                )
            }),
            loss: VocabParallelCrossEntropy::new(vocabulary, &comm)
                .with_label_smoothing(config.label_smoothing)
                .with_ignore(Some(Self::IGNORE)),
            comm,
            lies: match sequence_parallel {
                true => Lies::SplitAlong {
                    dim: SEQUENCE_DIM,
                    place,
                },
                false => Lies::Whole,
            },
            config: config.clone(),
        })
    }

    /// A target that has no loss.
    pub const IGNORE: i64 = -1;

    /// A model in f32 on `device`, built from `seed`.
    ///
    /// # Errors
    ///
    /// See [`TransformerConfig::init`].
    pub fn on(
        config: &TransformerConfig,
        groups: &Groups,
        device: &burn::tensor::Device,
        seed: u64,
        sequence_parallel: bool,
    ) -> Result<ParallelModule<Self>, BuildError> {
        let scope = Scope::with(groups, device, seed, burn::tensor::DType::F32);
        config.init(scope, sequence_parallel)
    }

    /// This rank's logits: `[batch, seq]` to `[batch, seq, padded vocabulary / tensor]`.
    fn local_logits(&self, tokens: Tensor<2, Int>, offset: Option<Tensor<3>>) -> Tensor<3> {
        let mut x = self.embedding.forward(tokens);
        if let Some(offset) = offset {
            x = x + match self.lies {
                Lies::Whole => offset,
                Lies::SplitAlong { dim, .. } => {
                    collective::scatter_sequence(offset, dim, &self.comm)
                }
            };
        }
        if let Some(positions) = &self.positions {
            x = positions.forward(x);
        }
        x = self.dropout.forward(x, self.lies);
        for block in &self.blocks {
            x = block.forward(x, self.rotary.as_ref(), self.lies);
        }
        self.output.forward(self.norm.forward(x), &self.embedding)
    }
}

impl LanguageModel for Transformer {
    fn losses(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        offset: Option<Tensor<3>>,
    ) -> Tensor<2> {
        self.loss
            .forward(self.local_logits(tokens, offset), targets)
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let logits = collective::gather(self.local_logits(tokens, None), 2, &self.comm);
        logits.narrow(2, 0, self.config.vocabulary)
    }

    fn context(&self) -> usize {
        self.config.context
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        let config = &self.config;
        let heads = config
            .head_width
            .map_or(config.hidden, |width| width * config.heads);
        let kv = heads / config.heads * config.groups();
        let mlp = config.mlp_width() * if config.activation.is_gated() { 3 } else { 2 };
        let block = config.hidden * (2 * heads + 2 * kv + mlp);
        let weights = config.layers * block + config.hidden * config.vocabulary;
        (6 * weights + 12 * config.layers * seq * heads) as f64
    }
}
