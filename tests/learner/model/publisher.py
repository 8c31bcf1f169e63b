"""A publisher for trainers that are not asked to publish."""


class NoPublisher:
    def publish(self, params, *, step, must_publish=False):
        del params, step, must_publish
