//! A test helper that the examples share.

use burn_megatron::data_parallel::{DataParallelConfig, Precision};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::kernels::record::ShapeSettings;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::RecomputeConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron_plan::memory::{MemoryRequest, plan_memory};

/// Plans the memory of every pipeline rank of a model, for each dtype.
pub fn in_each_type(config: &impl ModelConfig, recompute: &RecomputeConfig) {
    for precision in [Precision::F64, Precision::F32, Precision::Bf16] {
        let sharding = DataParallelConfig {
            precision,
            ..DataParallelConfig::default()
        };
        let layout = ParallelConfig::new().with_pipeline(2).with_data(2);
        let request = MemoryRequest {
            layout: &layout,
            ranks: 4,
            micro_batch_size: 2,
            sequence_length: 16,
            micro_batches: 2,
            sharding: &sharding,
            kernels: &KernelChoices::default(),
            fp8: &Fp8Config::default(),
            lora: None,
            recompute,
            settings: ShapeSettings::default(),
            slack: 1.0,
        };
        let report = plan_memory(config, &request).unwrap();
        for rank in &report.ranks {
            assert!(rank.peak.activations > 0, "{precision}: {:?}", rank.peak);
        }
    }
}
