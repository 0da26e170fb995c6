//! A decoder-only transformer.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_megatron::choice::Operation;
use burn_megatron::collective::{self, Comm};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernels::rope::{RopeConfig, RopeTable};
use burn_megatron::nn::{
    ActivationLayout, BatchFormat, BuildError, Dropout, Init, KvCache, LearnedPositions,
    LearnedPositionsConfig, LossTerm, Losses, ModelBuilder, Norm, OutputLayer, OutputLayerConfig,
    ParallelModule, SEQUENCE_DIM, VocabParallelCrossEntropy, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig, Vocabulary,
};
use burn_megatron::pipeline::split::StageLayout;
use burn_megatron::pipeline::stages_on_rank;
use burn_megatron::train::{LanguageModel, Tokens};

use crate::config::refused;
use crate::{Block, Positions, TransformerConfig};

/// A GPT-2 or a Llama, depending on its config: the whole model, or the stages of one pipeline rank.
///
/// Its forward is independent of ranks, except for the entry into the sequence-parallel region, where the
/// residual stream `[batch, seq, hidden]` becomes `[batch, seq / tensor, hidden]`.
#[derive(Module, Debug)]
pub struct Transformer {
    /// On the first stage; also on the last one if the output is tied to it.
    embedding: Option<VocabParallelEmbedding>,
    positions: Option<LearnedPositions>,
    dropout: Dropout,
    /// The blocks of all stages of this rank.
    blocks: Vec<Block>,
    norm: Option<Norm>,
    output: Option<OutputLayer>,
    #[module(skip)]
    stages: Vec<StageBlocks>,
    #[module(skip)]
    rotary: Option<RopeTable>,
    #[module(skip)]
    loss: VocabParallelCrossEntropy,
    #[module(skip)]
    comm: Comm,
    #[module(skip)]
    lies: ActivationLayout,
    #[module(skip)]
    config: TransformerConfig,
}

impl TransformerConfig {
    /// Builds this rank's part of the model in the layout of `ctx`, with its parameter table: in f32 on `device`,
    /// initialized with seed 0. See [`init_with`](Self::init_with) for other settings.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for sizes that do not fit each other or the layout.
    pub fn init(
        &self,
        ctx: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        self.init_with(ModelBuilder::new(ctx, device))
    }

    /// The same with the seed, the types and the kernels of a builder.
    ///
    /// If the scope [enables FP8](ModelBuilder::with_fp8), the attention projections and the MLP layers compute in 8
    /// bits, except for the first and last
    /// [`first_last_bf16`](burn_megatron::nn::fp8::Fp8Config::first_last_bf16) blocks of the whole model.
    ///
    /// # Errors
    ///
    /// See [`init`](Self::init).
    pub fn init_with(
        &self,
        scope: ModelBuilder,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        let ctx = scope.groups();
        self.check(scope.place().size, scope.sequence_parallel())?;
        let stages = stages_on_rank(ctx.config(), ctx.pipeline().rank(), self.layers)
            .map_err(|error| refused(error.to_string()))?;
        self.init_stages(scope, &stages)
    }

    /// Builds the stages of one pipeline rank, given as stage number and content.
    ///
    /// # Errors
    ///
    /// See [`init`](Self::init).
    pub fn init_stages(
        &self,
        scope: ModelBuilder,
        stages: &[(usize, StageLayout)],
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        let model = Transformer::new(self, &scope, stages)?;
        let layers: Vec<usize> = stages
            .iter()
            .flat_map(|(_, stage)| stage.layers.clone())
            .collect();
        // A rank numbers its blocks from 0; the table uses the layer in the whole model.
        scope.finish_stages(model, |path| {
            let Some(rest) = path.strip_prefix("blocks.") else {
                return path;
            };
            let block = rest
                .split_once('.')
                .and_then(|(block, rest)| Some((layers.get(block.parse::<usize>().ok()?)?, rest)));
            match block {
                Some((layer, rest)) => format!("blocks.{layer}.{rest}"),
                None => path,
            }
        })
    }
}

/// The number of blocks at each end of the whole model that do not compute in 8 bits.
fn blocks_at_ends(layers: usize, scope: &ModelBuilder) -> Result<usize, BuildError> {
    let ends = scope.fp8().config().first_last_bf16;
    if ends <= layers / 2 {
        Ok(ends)
    } else {
        Err(scope.child("blocks").error(format!(
            "first_last_bf16 = {ends} excludes {ends} blocks at each end from 8 bits, but there are only \
             {layers} in all: expected at most {}",
            layers / 2
        )))
    }
}

/// The blocks of one stage on this rank.
#[derive(Clone, Debug)]
struct StageBlocks {
    stage: usize,
    embedding: bool,
    /// Indices into the blocks of this rank.
    blocks: Range<usize>,
}

impl StageBlocks {
    /// Assigns consecutive blocks of this rank to its stages.
    fn number(stages: &[(usize, StageLayout)]) -> Vec<Self> {
        let mut first = 0;
        let part = |(stage, layout): &(usize, StageLayout)| {
            let blocks = first..first + layout.layers.len();
            first = blocks.end;
            Self {
                stage: *stage,
                embedding: layout.embedding,
                blocks,
            }
        };
        stages.iter().map(part).collect()
    }
}

impl Transformer {
    fn new(
        config: &TransformerConfig,
        scope: &ModelBuilder,
        stages: &[(usize, StageLayout)],
    ) -> Result<Self, BuildError> {
        let sequence_parallel = scope.sequence_parallel();
        let head_width = config.check(scope.place().size, sequence_parallel)?;
        let (place, init) = (scope.place(), Init::Normal(config.init_std));
        let hidden = config.hidden;
        let vocabulary = Vocabulary::padded(
            config.vocabulary,
            config.vocabulary_divisible_by,
            place.size,
        );
        let learned = config.positions == Positions::Learned;
        let rotary = config.rope(head_width).map(|rope| RopeConfig {
            // An outline needs no table.
            max_positions: if scope.is_outline() {
                1
            } else {
                rope.max_positions
            },
            ..rope
        });
        let rotary = rotary
            .map(|rope| RopeTable::new(&rope, scope.device(), scope.dtype()))
            .transpose()
            .map_err(|error| scope.error(error.to_string()))?;
        let ends = blocks_at_ends(config.layers, scope)?;
        let block = |(stage, i): (usize, usize)| {
            let scope = scope.child("blocks").child(i).in_stage(stage);
            let scope = if i < ends || i + ends >= config.layers {
                scope.without_fp8()
            } else {
                scope
            };
            Block::new(config, head_width, &scope)
        };
        let stage_where = |has: fn(&StageLayout) -> bool| {
            let stage = stages.iter().find(|(_, stage)| has(stage));
            stage.map_or(0, |(stage, _)| *stage)
        };
        let first_stage = stage_where(|stage| stage.embedding);
        let last_stage = stage_where(|stage| stage.loss);
        let comm = scope.groups().tensor().clone();
        let first = stages.iter().any(|(_, stage)| stage.embedding);
        let last = stages.iter().any(|(_, stage)| stage.loss);
        let embedding = || {
            let scope =
                scope
                    .child("embedding")
                    .in_stage(if first { first_stage } else { last_stage });
            // A tied weight has a copy on the first and on the last rank, unless one rank holds both stages.
            let ranks = scope.groups().pipeline().size();
            let scope = if config.tied && !(first && last) {
                scope.with_pipeline_copies([0, ranks - 1])
            } else {
                scope
            };
            VocabParallelEmbeddingConfig::new(vocabulary, hidden)
                .with_init(init)
                .init(&scope)
        };
        let output = || {
            let scope = scope.child("output").in_stage(last_stage);
            OutputLayerConfig::new(vocabulary, hidden)
                .with_init(init)
                .with_tied(config.tied)
                .init(&scope)
        };
        Ok(Self {
            embedding: (first || last && config.tied).then(embedding).transpose()?,
            positions: (first && learned).then(|| {
                let scope = scope.child("positions").in_stage(first_stage);
                LearnedPositionsConfig::new(config.context, hidden)
                    .with_init(init)
                    .init(&scope)
            }),
            dropout: Dropout::new(config.dropout, &scope.child("dropout"))?,
            blocks: stages
                .iter()
                .flat_map(|(stage, layout)| layout.layers.clone().map(|i| (*stage, i)))
                .map(block)
                .collect::<Result<_, _>>()?,
            norm: last.then(|| {
                let scope = scope.child("norm").in_stage(last_stage);
                config.norm().init(&scope)
            }),
            output: last.then(output).transpose()?,
            stages: StageBlocks::number(stages),
            rotary,
            loss: VocabParallelCrossEntropy::new(vocabulary, &comm)
                .with_label_smoothing(config.label_smoothing)
                .with_z_loss(config.z_loss)
                .with_fused(scope.is_fused(Operation::Loss))
                .with_ignore(Some(Self::IGNORE)),
            comm,
            lies: if sequence_parallel {
                ActivationLayout::SplitAlong {
                    dim: SEQUENCE_DIM,
                    place,
                }
            } else {
                ActivationLayout::Whole
            },
            config: config.clone(),
        })
    }

    /// The target that the loss ignores.
    pub const IGNORE: i64 = -1;

    /// Embeds tokens `[batch, seq]` into the residual stream.
    fn embed(&self, tokens: Tensor<2, Int>, reading: &BatchFormat<'_>) -> Tensor<3> {
        let Some(embedding) = &self.embedding else {
            not_on_this_rank("the embedding")
        };
        let mut x = embedding.forward(tokens);
        if let Some(positions) = &self.positions {
            x = positions.forward_with_format(x, reading);
        }
        self.dropout.forward(x, self.lies)
    }

    /// Runs the layers of a stage.
    fn run_stage(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        tokens: Tensor<2, Int>,
        mut reading: BatchFormat<'_>,
    ) -> Tensor<3> {
        let Some(part) = self.stages.iter().find(|part| part.stage == stage) else {
            not_on_this_rank(&format!("stage {stage}"))
        };
        let x = match input {
            Some(x) => x,
            None if part.embedding => self.embed(tokens, &reading),
            None => not_on_this_rank("an input"),
        };
        part.blocks.clone().fold(x, |x, i| {
            let (rotary, context) = (self.rotary.as_ref(), reading.layer(i));
            self.blocks[i].forward(x, rotary, self.lies, context)
        })
    }

    /// The residual stream to this rank's logits `[batch, seq, padded vocabulary / tensor]`.
    fn head(&self, x: Tensor<3>) -> Tensor<3> {
        match (&self.norm, &self.output) {
            (Some(norm), Some(output)) => output.forward(norm.forward(x), self.embedding.as_ref()),
            _ => not_on_this_rank("the output layer"),
        }
    }
}

/// Panics: a stage was called on a rank that does not have it, which is a bug of the caller.
fn not_on_this_rank(what: &str) -> ! {
    panic!("{what} is not on this rank of the pipeline")
}

impl LanguageModel for Transformer {
    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        let reading = tokens.format();
        self.run_stage(stage, input, tokens.ids, reading)
    }

    fn hidden_cached(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        cache: &mut KvCache,
    ) -> Tensor<3> {
        self.run_stage(stage, input, ids, BatchFormat::Cached(cache))
    }

    fn cache(&self) -> KvCache {
        KvCache::new(self.blocks.len(), self.config.context)
    }

    fn sequence_multiple(&self) -> usize {
        match self.lies {
            ActivationLayout::Whole => 1,
            ActivationLayout::SplitAlong { place, .. } => place.size,
        }
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.loss.losses(self.head(hidden), targets)
    }

    fn loss_terms(&self) -> &[LossTerm] {
        self.loss.terms()
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        let logits = collective::gather(self.head(hidden), 2, &self.comm);
        logits.narrow(2, 0, self.config.vocabulary)
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn output_weight(&self) -> &str {
        if self.config.tied {
            "embedding.weight"
        } else {
            "output.weight"
        }
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
        // In f64: for long sequences the second product would overflow a usize.
        6.0 * weights as f64 + 12.0 * config.layers as f64 * seq as f64 * heads as f64
    }
}
