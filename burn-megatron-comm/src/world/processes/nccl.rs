//! The function that opens the `nccl` engine.

use std::sync::Arc;
use std::time::Duration;

use crate::engines::nccl::{NcclOptions, NcclTransport};
use crate::error::CommError;
use crate::nccl_config::NcclConfig;
use crate::process::Transport;
use burn_megatron_probe as probe;
use burn_megatron_rendezvous::{Launch, RendezvousClient};

/// Opens the `nccl` engine on the device of this rank. The local ranks are assigned to the devices of the machine
/// round-robin.
pub(super) fn open(
    launch: &Launch,
    timeout: Duration,
    client: Option<&Arc<RendezvousClient>>,
    config: &NcclConfig,
) -> Result<Arc<dyn Transport>, CommError> {
    let Some(client) = client else {
        unreachable!("the ranks join the rendezvous before NCCL is opened");
    };
    let devices = probe::cuda_driver().map_or(1, |driver| driver.devices.max(1));
    let options = NcclOptions {
        config: config.clone(),
        ..NcclOptions::default()
    };
    let transport = NcclTransport::open(
        launch.local_rank % devices,
        launch.rank,
        launch.world_size,
        client.clone(),
        Arc::default(),
        timeout,
        options,
    )?;
    Ok(transport)
}
