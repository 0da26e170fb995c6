//! The requests of these tests.

use burn::tensor::DType;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelConfig, Precision, ZeroStage};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::kernels::record::ShapeSettings;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::RecomputeConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron_models::TransformerConfig;
use burn_megatron_plan::memory::MemoryRequest;
use burn_megatron_plan::recorded_step::ProfileRequest;

/// The number of samples per micro-batch.
pub const ROWS: usize = 2;

/// The settings of a request.
#[derive(Default)]
pub struct Settings {
    pub sharding: DataParallelConfig,
    pub recompute: RecomputeConfig,
    pub kernels: KernelChoices,
    pub fp8: Fp8Config,
}

impl Settings {
    pub fn in_bf16_with_zero_1() -> Self {
        let sharding = DataParallelConfig {
            zero_stage: ZeroStage::Optimizer,
            precision: Precision::Bf16,
            ..DataParallelConfig::default()
        };
        Self {
            sharding,
            ..Self::default()
        }
    }

    /// Returns the request for the profile of a rank, in f32.
    pub fn profile<'a>(
        &'a self,
        config: &TransformerConfig,
        groups: &'a ParallelContext,
    ) -> ProfileRequest<'a> {
        ProfileRequest {
            groups,
            dtype: DType::F32,
            kernels: &self.kernels,
            fp8: &self.fp8,
            lora: None,
            freeze: &[],
            recompute: &self.recompute,
            shape: [ROWS, config.context],
            input: [0; 3],
            settings: ShapeSettings::default(),
        }
    }

    /// Returns the request for the memory of a step of four micro-batches.
    pub fn memory<'a>(
        &'a self,
        config: &TransformerConfig,
        layout: &'a ParallelConfig,
        ranks: usize,
    ) -> MemoryRequest<'a> {
        MemoryRequest {
            layout,
            ranks,
            micro_batch_size: ROWS,
            sequence_length: config.context,
            micro_batches: 4,
            sharding: &self.sharding,
            kernels: &self.kernels,
            fp8: &self.fp8,
            lora: None,
            recompute: &self.recompute,
            settings: ShapeSettings::default(),
            slack: 1.0,
        }
    }
}
