//! How the engine `nccl` is opened.

use std::env;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::CommError;
use crate::installed;
use crate::launch::Launch;
use crate::nccl::{NcclOptions, NcclTransport};
use crate::process::{Bulletin, FileBulletin, Transport};
use crate::rendezvous::Member;

/// A folder that all ranks see: NCCL's ids go through it instead of through the rendezvous.
const ID_FOLDER: &str = "BURN_MEGATRON_NCCL_ID_DIR";

/// The engine on this rank's device: the ranks of a machine take its devices in turn.
pub(super) fn open(
    launch: &Launch,
    patience: Duration,
    member: Option<&Arc<Member>>,
    registered: bool,
) -> Result<Arc<dyn Transport>, CommError> {
    let Some(member) = member else {
        unreachable!("the ranks meet at the rendezvous before NCCL is opened");
    };
    let devices = installed::cuda_driver().map_or(1, |driver| driver.devices.max(1));
    let bulletin: Arc<dyn Bulletin> = match env::var_os(ID_FOLDER) {
        Some(folder) => {
            let run = launch.job.as_deref().unwrap_or("run");
            Arc::new(FileBulletin::open(Path::new(&folder), run)?)
        }
        None => Arc::clone(member) as Arc<dyn Bulletin>,
    };
    let options = NcclOptions {
        registered,
        ..NcclOptions::default()
    };
    let transport = NcclTransport::open(
        launch.local_rank % devices,
        launch.rank,
        launch.world_size,
        bulletin,
        Arc::default(),
        patience,
        options,
    )?;
    Ok(transport)
}
