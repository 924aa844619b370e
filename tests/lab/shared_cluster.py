"""A Ray cluster that modules of tests share where they follow one another in a process."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack

from filelock import FileLock


class SharedCluster:
    """A cluster of 2 CPUs on this machine, started when first asked for."""

    def __init__(self, one_at_a_time: FileLock, environment: dict[str, str]) -> None:
        """Start nothing.

        Args:
            one_at_a_time: held while the cluster starts.
            environment: variables of its workers.
        """
        self._one_at_a_time, self._environment = one_at_a_time, environment
        self._is_running = False
        self._address_info: dict[str, str] = {}
        self._folder = ""

    @property
    def is_running(self) -> bool:
        """Return whether it has been started and not ended."""
        return self._is_running

    def get(self) -> dict[str, str]:
        """Return the address info of the running cluster, or of a new one where none is running."""
        if not self._is_running:
            with ExitStack() as stack:
                stack.callback(self.end)  # of a cluster that did not start
                self._start()
                stack.pop_all()
        return self._address_info

    def end(self) -> None:
        """End the cluster, if one is running, without a trace."""
        if self.is_running:
            import ray

            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._is_running = False

    def _start(self) -> None:
        import ray

        self._is_running = True
        self._folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short: paths of UNIX sockets end at 107 bytes
        with self._one_at_a_time:
            context = ray.init(
                "local",  # and never the head that another file has started
                num_cpus=2,
                num_gpus=0,
                object_store_memory=200 * 1024**2,
                namespace="raycl-tests",
                include_dashboard=True,  # without it Train's cleaner of placement groups warns every second
                log_to_driver=False,
                runtime_env={"env_vars": self._environment},
                _temp_dir=self._folder,
                _system_config={"metrics_report_interval_ms": 3000},  # Ray's: 10,000, for which tests would wait
            )
        self._address_info = dict(context.address_info)
