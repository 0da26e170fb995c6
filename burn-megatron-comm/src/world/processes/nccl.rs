//! Opens the engine `nccl`.

use std::env;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::engines::nccl::{NcclOptions, NcclTransport};
use crate::error::CommError;
use crate::launch::Launch;
use crate::probe;
use crate::process::{FileStore, KeyValueStore, Transport};
use crate::rendezvous::RendezvousClient;

/// A folder that all ranks can access, through which NCCL's ids are exchanged instead of the rendezvous.
const ID_FOLDER: &str = "BURN_MEGATRON_NCCL_ID_DIR";

/// Opens the engine on this rank's device: local ranks use the devices of the machine in turn.
pub(super) fn open(
    launch: &Launch,
    timeout: Duration,
    client: Option<&Arc<RendezvousClient>>,
    registered_buffers: bool,
) -> Result<Arc<dyn Transport>, CommError> {
    let Some(client) = client else {
        unreachable!("the ranks join the rendezvous before NCCL is opened");
    };
    let devices = probe::cuda_driver().map_or(1, |driver| driver.devices.max(1));
    let store: Arc<dyn KeyValueStore> = match env::var_os(ID_FOLDER) {
        Some(folder) => {
            let run = launch.job.as_deref().unwrap_or("run");
            Arc::new(FileStore::open(Path::new(&folder), run)?)
        }
        None => Arc::clone(client) as Arc<dyn KeyValueStore>,
    };
    let options = NcclOptions {
        registered: registered_buffers,
        ..NcclOptions::default()
    };
    let transport = NcclTransport::open(
        launch.local_rank % devices,
        launch.rank,
        launch.world_size,
        store,
        Arc::default(),
        timeout,
        options,
    )?;
    Ok(transport)
}
