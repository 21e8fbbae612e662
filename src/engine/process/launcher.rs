//! What a launcher (torchrun, Open MPI, Slurm) tells a process of its place in the job.

/// The variables for one number, the first that has it.
type Variables = [&'static str; 3];

const RANK: Variables = ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];
const LOCAL_RANK: Variables = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"];
const WORLD_SIZE: Variables = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"];

/// The rank in the job, as digits. `lookup` reads a variable.
pub fn rank(lookup: impl Fn(&str) -> Option<String>) -> Option<String> {
    first(RANK, lookup)
}

/// The rank among the job's processes on this host.
pub fn local_rank(lookup: impl Fn(&str) -> Option<String>) -> Option<u64> {
    first(LOCAL_RANK, lookup)?.parse().ok()
}

/// How many processes the job has.
pub fn world_size(lookup: impl Fn(&str) -> Option<String>) -> Option<u64> {
    first(WORLD_SIZE, lookup)?.parse().ok()
}

fn first(variables: Variables, lookup: impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut found = variables.iter().filter_map(|name| lookup(name));
    found.find(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
}
